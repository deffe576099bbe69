"""Describe a data source and, for a preset or a config, how its images are split among the clients."""

from typing import Any

from ..config import load_config, parse_config, preset_names
from ..data import USUAL_SIDE, UnequalSizesError, digest, fit_rad, image_sizes, kept_apart, load_images
from ..federation.participants.local import split_data_set


def describe_data(source: str, overrides: list[str]) -> dict[str, Any]:
    """Return counts, shape and classes as JSON. `source` is a preset, a config file or a data source."""
    has_clients = source in preset_names() or source.endswith(".toml")
    settings = [f"data.source='{source}'", *overrides]
    config = load_config(source, overrides) if has_clients else parse_config("", settings)
    facts: dict[str, Any] = {"source": config.data.source}
    try:
        train, test = load_images(config.data, "train"), load_images(config.data, "test")
    except UnequalSizesError:
        sizes = [f"{width}x{height}" for width, height in image_sizes(config.data)]
        facts["sizes"] = f"{sizes[0]} to {sizes[-1]} pixels"
        advice = f"set data.side, for example {USUAL_SIDE}, to crop and resize all images; without it a run is refused."
        facts["advice"] = f"{advice} What follows is with data.side = {USUAL_SIDE}"
        config = config.model_copy(update={"data": config.data.model_copy(update={"side": USUAL_SIDE})})
        train, test = load_images(config.data, "train"), load_images(config.data, "test")
    kept, count = kept_apart(config, train), min(len(train), config.data.limit or len(train))
    facts |= {
        "train_images": len(train),
        "test_images": len(test),
        "shape": list(train.pixels.shape[1:]),
        "classes": list(train.classes),
        "labels": train.labels is not None,
        "skipped": len(skipped := train.skipped + test.skipped),
        **({"skipped_images": [f"{image} {reason}" for _, image, reason in skipped]} if skipped else {}),
        "kept_by_a_run": {**kept._asdict(), "clients": max(0, count - sum(kept))},
    }
    if train.labels is not None and not has_clients:
        facts["images_per_class"] = train.labels.bincount().tolist()
    elif train.labels is not None:
        setup = split_data_set(fit_rad(config, *train.pixels.shape[1:3]))
        facts |= {"rad_images": len(setup.rad), "rad_digest": digest(setup.rad), "clients": setup.facts["holdings"]}
    return facts

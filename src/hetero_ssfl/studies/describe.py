"""Describe a data source and, for a preset or a config, how its images are split among the clients."""

from typing import Any

from ..config import load_config, parse_config, preset_names
from ..data import USUAL_SIDE, UnequalSizesError, digest, fit_rad, image_sizes, kept_apart, load_images
from ..federation.participants.split import split_data_set


def describe_data(source: str, overrides: list[str]) -> dict[str, Any]:
    """Return counts, shape and classes as JSON. `source` is a preset, a config file or a data source."""
    has_clients = source in preset_names() or source.endswith(".toml")
    config = (
        load_config(source, overrides) if has_clients else parse_config("", [f"data.source='{source}'", *overrides])
    )
    facts: dict[str, Any] = {"source": config.data.source}
    try:
        train, test = load_images(config.data, "train"), load_images(config.data, "test")
    except UnequalSizesError:
        sizes = [f"{width}x{height}" for width, height in image_sizes(config.data)]
        facts |= {
            "sizes": f"{sizes[0]} to {sizes[-1]} pixels",
            "advice": f"set data.side, for example {USUAL_SIDE}, to crop and resize all images; without it a run is "
            f"refused. What follows is with data.side = {USUAL_SIDE}",
        }
        config = config.model_copy(update={"data": config.data.model_copy(update={"side": USUAL_SIDE})})
        train, test = load_images(config.data, "train"), load_images(config.data, "test")
    facts |= {
        "train_images": len(train),
        "test_images": len(test),
        "shape": list(train.pixels.shape[1:]),
        "classes": list(train.classes),
        "labels": train.labels is not None,
        "skipped": train.skipped + test.skipped,
    }
    kept = kept_apart(config, train)
    count = min(len(train), config.data.limit or len(train))
    facts["kept_by_a_run"] = {**kept._asdict(), "clients": max(0, count - sum(kept))}
    if train.labels is not None and not has_clients:
        facts["images_per_class"] = train.labels.bincount().tolist()
    elif train.labels is not None:
        setup = split_data_set(fit_rad(config, *train.pixels.shape[1:3]))
        facts |= {
            "rad_images": len(setup.rad),
            "rad_digest": digest(setup.rad),
            "clients": setup.facts["holdings"],
        }
    return facts

"""Write model cards: what an encoder is, how it was trained, its accuracy, and how to load it (templates/card.md)."""

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ..errors import ConfigError
from ..learning.encoders import parse_spec
from ..plugins import GIVEN, find, is_trusted
from ..report.tables import number, without_folders
from ..runs.events import ClientTrained, is_number
from ..terminal import printable
from .models import ModelFolder

SPENT = ("epsilon", "delta", "clip", "releases")
TITLES = {
    "safetensors": "safetensors, with the encoder's own class",
    "torch-export": "torch.export, with torch alone",
    "onnx": "ONNX, with onnxruntime",
}


def model_card(
    model: ModelFolder, encoder: str | None, files: Mapping[str, str], building: list[str] | None = None
) -> str:
    """Return Markdown with front matter.

    `files` maps formats to file names; `encoder` overrides the card's encoder, `building` the code that builds it.
    """
    shape, takes = model.shape, f"inputs of shape ({', '.join(map(str, model.shape))})"
    if model.takes_images:
        kind = {1: "grey images", 3: "colour images"}.get(shape[0], f"images of {shape[0]} channels,")
        takes = f"{kind} of {shape[-1]} x {shape[-1]} pixels"
    results: dict[str, Any] = model.run.read_json("results.json") if model.run else {}
    own = [results.get(part, {}).get(model.client, {}) for part in ("clients", "untrained")]
    floors = {name: scores.get(model.client, {}) for name, scores in results.get("floors", {}).items()}
    columns = [*own, *floors.values(), results.get("mean", {})]  # without a run or labels there is nothing in them
    templates = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=templates, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"line": _line, "text": _text}
    return environment.get_template("card.md").render(
        model=model,
        task="image-feature-extraction" if model.takes_images else "feature-extraction",
        shape=shape,
        takes=takes,
        training=_training(model, results),
        scores={name: [number(column.get(name)) for column in columns] for name in sorted(columns[0])},
        floors=list(floors),
        files=files,
        titles=TITLES,
        building=building or (_building(model, encoder) if "safetensors" in files else []),
    )


def _training(model: ModelFolder, results: Mapping[str, Any]) -> dict[str, Any]:
    card = model.card
    facts = {"method": card.get("method"), "rounds": card.get("round"), "seed": card.get("seed")}
    if model.run is not None:
        config = model.run.read_config()
        events = [e for e in model.run.events() if isinstance(e, ClientTrained) and e.client == model.client]
        examples = [e.examples for e in events if e.examples is not None]
        facts |= {
            "self-supervised loss": config.ssl.kind,
            "local epochs per round": config.local_epochs or f"about {config.local_steps} steps",
            "data": without_folders(config.data.source),
            "participants": len(results["clients"]) + len(results.get("absent", [])),
            "examples of this participant": f"{examples[-1]:,}" if examples else None,
            "examples of the shared set (RAD)": f"{config.rad.size:,}",
            "commit": model.run.read_json("environment.json").get("commit"),
        }
    return {
        **facts,
        "privacy of what was sent": _privacy(card.get("privacy")),
        "RAD digest": str(card["rad_digest"])[:12] if card.get("rad_digest") else None,
        "DICOM and NIfTI images": _scans(card["input"]),
        "hetero-ssfl": card.get("hetero_ssfl"),
    }


def _scans(takes: Mapping[str, Any]) -> str | None:
    """Return the settings by which scans are read, if they are not the usual ones."""
    window, axis = takes.get("window", "file"), takes.get("axis", "axial")
    return None if (window, axis) == ("file", "axial") else f"data.window = {window}, data.axis = {axis}"


def _privacy(spent: object) -> str | None:
    """Return what the participant spent, from a card that someone else may have written; None without noise."""
    if not isinstance(spent, Mapping) or not all(is_number(spent.get(key)) for key in SPENT):
        return None
    epsilon, delta, clip, releases = (spent[key] for key in SPENT)
    how = "in secure sums" if spent.get("secure_sums") else "each sent by itself"
    return (
        f"epsilon {epsilon:.3g} at delta {delta:g}, for the whole of its {releases} contributions (norm at most "
        f"{clip:g}, {how}). It does not cover these weights or the accuracies below."
    )


def _text(value: object) -> str:
    """Return a value that others may have written as one line without Markdown or HTML."""
    return re.sub(r"[|`<>\[\]]", lambda found: f"&#{ord(found[0])};", _line(value))


def _line(value: object) -> str:
    return printable(" ".join(str(value).split()))


def _building(model: ModelFolder, encoder: str | None) -> list[str]:
    """Return the lines of code that build an untrained encoder of this architecture."""
    spec, channels, side = encoder or model.card["encoder"], model.shape[0], model.shape[-1]
    name, options = parse_spec(spec)
    source, colon, attribute = name.partition(":")
    if source == GIVEN:
        return [f"encoder = ...  # {_line(attribute)}, as it was passed to federate()"]
    if source == "timm":
        options = {"num_classes": 0, "in_chans": channels, **options}
        return ["import timm", f"encoder = timm.create_model({attribute!r}, {_arguments(options)})"]
    if not colon or source == "torchvision":
        build = f"encoder, width = build_encoder({spec!r}, {channels}, {side})"
        return ["from hetero_ssfl import build_encoder", build]
    if not re.fullmatch(r"[\w.]+:[\w.]+", name):
        return ["encoder = ...  # the encoder named above"]
    accepted: set[str] = set()
    if encoder or is_trusted(spec):
        with suppress(ConfigError, ValueError, TypeError):  # exporting safetensors does not need the class
            accepted = set(inspect.signature(find(name, "encoder")).parameters)
    usual = {key: value for key, value in {"in_channels": channels, "side": side}.items() if key in accepted}
    return [f"from {source} import {attribute}", f"encoder = {attribute}({_arguments({**usual, **options})})"]


def _arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())

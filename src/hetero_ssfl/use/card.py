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
from ..report.tables import number
from ..runs.events import ClientTrained, is_number
from ..terminal import printable
from .models import ModelFolder

SPENT = ("epsilon", "delta", "clip", "releases")


def model_card(model: ModelFolder, encoder: str | None, files: Mapping[str, str]) -> str:
    """Return Markdown with front matter. `files` maps formats to file names; `encoder` overrides the card's encoder."""
    shape, takes = model.shape, f"inputs of shape ({', '.join(map(str, model.shape))})"
    if model.takes_images:
        kind = {1: "grey images", 3: "colour images"}.get(shape[0], f"images of {shape[0]} channels,")
        takes = f"{kind} of {shape[-1]} x {shape[-1]} pixels"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"line": _line, "text": _text}
    return environment.get_template("card.md").render(
        model=model,
        task="image-feature-extraction" if model.takes_images else "feature-extraction",
        shape=shape,
        takes=takes,
        training=_training(model),
        scores=_scores(model),
        loading=[_loading(kind, name, model, encoder) for kind, name in files.items()],
    )


def _training(model: ModelFolder) -> dict[str, Any]:
    card = model.card
    facts = {"method": card.get("method"), "rounds": card.get("round"), "seed": card.get("seed")}
    if model.run is not None:
        config, results = model.run.read_config(), model.run.read_json("results.json")
        events = [e for e in model.run.events() if isinstance(e, ClientTrained) and e.client == model.client]
        examples = [e.examples for e in events if e.examples is not None]
        facts |= {
            "self-supervised loss": config.ssl.kind,
            "local epochs per round": config.local_epochs,
            "participants": len(results["clients"]) + len(results.get("absent", [])),
            "examples of this participant": f"{examples[-1]:,}" if examples else None,
            "examples of the shared set (RAD)": f"{config.rad.size:,}",
            "commit": model.run.read_json("environment.json").get("commit"),
        }
    return {
        **facts,
        "privacy of what was sent": _privacy(card.get("privacy")),
        "RAD digest": str(card["rad_digest"])[:12] if card.get("rad_digest") else None,
        "hetero-ssfl": card.get("hetero_ssfl"),
    }


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


def _scores(model: ModelFolder) -> dict[str, list[str]]:
    """Return probe accuracies of this encoder, untrained, and of all participants; empty without run or labels."""
    results: dict[str, Any] = model.run.read_json("results.json") if model.run else {}
    scores = results.get("clients", {}).get(model.client, {})
    untrained, mean = results.get("untrained", {}).get(model.client, {}), results.get("mean", {})
    return {name: [number(column.get(name)) for column in (scores, untrained, mean)] for name in sorted(scores)}


def _text(value: object) -> str:
    """Return a value that others may have written as one line without Markdown or HTML."""
    return re.sub(r"[|`<>\[\]]", lambda found: f"&#{ord(found[0])};", _line(value))


def _line(value: object) -> str:
    return printable(" ".join(str(value).split()))


def _loading(kind: str, file: str, model: ModelFolder, encoder: str | None) -> tuple[str, bool, list[str]]:
    """Return a title, whether the file includes the normalisation, and lines of code."""
    normalised = "mean" in model.card["input"]
    if kind == "onnx":
        code = [
            "import onnxruntime",
            f'session = onnxruntime.InferenceSession("{file}")',
            'features = session.run(None, {"images": images})[0]  # images: a numpy array',
        ]
        return "ONNX, with onnxruntime", normalised, code
    if kind == "torch-export":
        code = ["import torch", f'encoder = torch.export.load("{file}").module()', "features = encoder(images)"]
        return "torch.export, with torch alone", normalised, code
    mean, std = model.normalisation
    code = [
        "from safetensors.torch import load_file",
        *_building(model, encoder),
        f'encoder.load_state_dict(load_file("{file}"))',
        f"features = encoder.eval()((images - {mean}) / {std})",
    ]
    return "safetensors, with the encoder's own class", False, code


def _building(model: ModelFolder, encoder: str | None) -> list[str]:
    """Return the lines of code that build an untrained encoder of this architecture."""
    spec, channels, side = encoder or model.card["encoder"], model.shape[0], model.shape[-1]
    name, options = parse_spec(spec)
    source, colon, attribute = name.partition(":")
    if source == GIVEN:
        return [f"encoder = ...  # {_line(attribute)}, as it was passed to federate()"]
    if source == "timm":
        given = {"num_classes": 0, "in_chans": channels, **options}
        return ["import timm", f"encoder = timm.create_model({attribute!r}, {_arguments(given)})"]
    if not colon or source == "torchvision":
        return [
            "from hetero_ssfl import build_encoder",
            f"encoder, width = build_encoder({spec!r}, {channels}, {side})",
        ]
    if not re.fullmatch(r"[\w.]+:[\w.]+", name):
        return ["encoder = ...  # the encoder named above"]
    given = {"in_channels": channels, "side": side}
    accepted: set[str] = set()
    if encoder or is_trusted(spec):
        with suppress(ConfigError, ValueError, TypeError):  # exporting safetensors does not need the class
            accepted = set(inspect.signature(find(name, "encoder")).parameters)
    arguments = {**{key: value for key, value in given.items() if key in accepted}, **options}
    return [f"from {source} import {attribute}", f"encoder = {attribute}({_arguments(arguments)})"]


def _arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())

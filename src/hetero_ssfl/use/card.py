"""Write model cards: what an encoder is, how it was trained, its accuracy, and how to load it."""

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import ConfigError
from ..learning.encoders import parse_spec
from ..plugins import GIVEN, find, is_trusted
from ..runs.events import ClientTrained, is_number
from ..terminal import printable
from .models import ModelFolder

HEAD = """---
library_name: pytorch
pipeline_tag: {task}
tags: [self-supervised-learning, federated-learning, {task}, hetero-ssfl]
---
"""
PAPER = (
    "Each participant trains its own architecture on its own data without labels and sends only representations of a "
    "small shared set (D. Makhija, N. Ho, J. Ghosh, *Federated Self-supervised Learning for Heterogeneous Clients*)."
)
SPENT = ("epsilon", "delta", "clip", "releases")
LIMITS = """## Limits

- It was trained on the data of one federation. It may embed other data poorly: measure it on your own task first.
- Accuracies are measured with probes on frozen features, not with a finished classifier.
- Weights can reveal information about the training data. There is no formal privacy guarantee.
- This card gives no licence: the owner of the data and the model decides on one.
"""


def model_card(model: ModelFolder, encoder: str | None, files: Mapping[str, str]) -> str:
    """Return Markdown with front matter. `files` maps formats to file names; `encoder` overrides the card's encoder."""
    card, shape, side = model.card, ", ".join(map(str, model.shape)), model.shape[-1]
    scaled = " with values from 0 to 1" if "mean" in card["input"] else ""
    takes, given = f"inputs of shape ({shape})", f"Inputs are float32 of shape (n, {shape}){scaled}."
    if model.takes_images:
        kind = {1: "grey images", 3: "colour images"}.get(model.shape[0], f"images of {model.shape[0]} channels,")
        takes = f"{kind} of {side} x {side} pixels"
        given = (
            f"Images are resized so that the shorter side fits, cropped to the middle {side} x {side} pixels, and "
            f"given as float32 of shape (n, {shape}){scaled}."
        )
    parts = [
        HEAD.format(task="image-feature-extraction" if model.takes_images else "feature-extraction"),
        f"# {_text(model.client)}: `{_line(card['encoder']).replace('`', '')}`",
        f"An encoder with {card.get('parameters', 0):,} parameters that maps {takes} to feature vectors, trained in a "
        f"federation with hetero-ssfl. {PAPER if card.get('method') == 'hetero-ssfl' else ''}",
        _training(model),
        _results(model),
        "## Load it\n",
        given,
        *[_loading(kind, name, model, encoder) for kind, name in files.items()],
        LIMITS,
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _training(model: ModelFolder) -> str:
    card = model.card
    facts = {"method": card.get("method"), "rounds": card.get("round"), "seed": card.get("seed")}
    if model.run is not None:
        config = model.run.read_config()
        events = [e for e in model.run.events() if isinstance(e, ClientTrained) and e.client == model.client]
        examples = [e.examples for e in events if e.examples is not None]
        results = model.run.read_json("results.json")
        facts |= {
            "self-supervised loss": config.ssl.kind,
            "local epochs per round": config.local_epochs,
            "participants": len(results["clients"]) + len(results.get("absent", [])),
            "examples of this participant": f"{examples[-1]:,}" if examples else None,
            "examples of the shared set (RAD)": f"{config.rad.size:,}",
        }
        facts |= {"commit": model.run.read_json("environment.json").get("commit")}
    facts |= {"privacy of what was sent": _privacy(card.get("privacy"))}
    facts |= {"RAD digest": f"{card['rad_digest'][:12]}" if card.get("rad_digest") else None}
    facts |= {"hetero-ssfl": card.get("hetero_ssfl")}
    rows = [f"| {key} | {_text(value)} |" for key, value in facts.items() if value is not None]
    return "\n".join(["## How it was trained\n", "| | |", "|---|---|", *rows])


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


def _results(model: ModelFolder) -> str:
    """Return a table of probe accuracies if the run is available and has labels."""
    results: dict[str, Any] = model.run.read_json("results.json") if model.run else {}
    scores = results.get("clients", {}).get(model.client, {})
    if not scores:
        return ""
    untrained, mean = results.get("untrained", {}).get(model.client, {}), results.get("mean", {})
    rows = [
        f"| {_text(name).replace('_', ', ')} | {value:.1f} | {_figure(untrained.get(name))} "
        f"| {_figure(mean.get(name))} |"
        for name, value in sorted(scores.items())
    ]
    head = "| probe | this encoder | the same untrained | mean over participants |"
    text = "`all`: every class; `own`: the classes that this participant holds."
    return "\n".join(["## Accuracy on test data (%)\n", head, "|---|---|---|---|", *rows, "", text])


def _text(value: object) -> str:
    """Return a value that others may have written as one line without Markdown or HTML."""
    return re.sub(r"[|`<>\[\]]", lambda found: f"&#{ord(found[0])};", _line(value))


def _line(value: object) -> str:
    return printable(" ".join(str(value).split()))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _loading(kind: str, file: str, model: ModelFolder, encoder: str | None) -> str:
    if kind == "onnx":
        title, code = (
            "ONNX, with onnxruntime",
            [
                "import onnxruntime",
                f'session = onnxruntime.InferenceSession("{file}")',
                'features = session.run(None, {"images": images})[0]  # images: a numpy array',
            ],
        )
    elif kind == "torch-export":
        title, code = (
            "torch.export, with torch alone",
            [
                "import torch",
                f'encoder = torch.export.load("{file}").module()',
                "features = encoder(images)",
            ],
        )
    else:
        mean, std = model.normalisation
        title, code = (
            "safetensors, with the encoder's own class",
            [
                "from safetensors.torch import load_file",
                *_building(model, encoder),
                f'encoder.load_state_dict(load_file("{file}"))',
                f"features = encoder.eval()((images - {mean}) / {std})",
            ],
        )
    has_normalisation = kind != "safetensors" and "mean" in model.card["input"]
    inside = "The file includes the normalisation.\n\n" if has_normalisation else ""
    return f"### {title}\n\n{inside}```python\n" + "\n".join(code) + "\n```"


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

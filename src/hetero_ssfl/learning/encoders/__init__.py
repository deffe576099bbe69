"""Build encoders from descriptions such as `resnet10(width=16)`.

An encoder is a module that maps images to vectors: a built-in one, one of timm or torchvision, or the result of any
importable callable that returns an nn.Module. A dry run determines its output width.
"""

import ast
import copy
import difflib
import fnmatch
import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...plugins import GIVEN, find, install_command, load_module, place
from .mobilenet import MobileNet
from .onednn import guard_convolutions
from .resnet import STAGES, ResNet
from .vit import ViT

BUILTIN: dict[str, Callable[..., nn.Module]] = {
    **{f"resnet{depth}": partial(ResNet, depth) for depth in STAGES},
    "mobilenet": MobileNet,
    "vit": ViT,
}
HUB_SECONDS = 5.0
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def list_encoders(pattern: str = "*") -> list[str]:
    """Return the names of the built-in encoders and, if timm is installed, of its models, which match the pattern.

    list_encoders("*vit*")  # ["vit", "timm:beitv2_...", ...]
    """
    names = list(BUILTIN)
    with suppress(Exception):  # timm is optional, and a broken installation raises more than ImportError
        names += [f"timm:{name}" for name in importlib.import_module("timm").list_models()]
    return fnmatch.filter(names, pattern)


def build_encoder(spec: str, in_channels: int, side: int, example: Tensor | None = None) -> tuple[nn.Module, int]:
    """Return the encoder and the width of its output. Parameters are drawn from torch's global generator.

    The encoder is tried on two blank images, or on the batch `example` if its input is not images.
    """
    name, options = parse_spec(spec)
    factory = _factory(name)
    accepted = inspect.signature(factory).parameters
    given = {key: value for key, value in {"in_channels": in_channels, "side": side}.items() if key in accepted}
    unknown = [key for key in options if key not in accepted]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        names = ", ".join(key for key in accepted if key not in given)
        raise ConfigError(f"encoder '{spec}' has no option '{unknown[0]}', expected one of: {names}.")
    if name.startswith("timm:"):
        given = {"in_chans": in_channels, "num_classes": 0}
        if options.get("pretrained"):
            _check_weights(name.removeprefix("timm:"))
    try:
        encoder = factory(**{**given, **options})
    except Exception as error:  # a user's callable may raise anything
        raise ConfigError(f"encoder '{spec}' cannot be built: {_line(error)}. Change its options.") from error
    if not isinstance(encoder, nn.Module):
        raise ConfigError(
            f"encoder '{spec}' returned {type(encoder).__name__}, expected a torch.nn.Module. "
            "Name a class or a function that returns one."
        )
    width = output_width(encoder, spec, torch.zeros(2, in_channels, side, side) if example is None else example)
    guard_convolutions(encoder)  # after the dry run, which gives lazy layers their shape
    return encoder, width


def _check_weights(name: str) -> None:
    """Raise an error at once if trained weights are neither here nor on the hub: timm would try for a minute."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    hub_id = getattr(importlib.import_module("timm").get_pretrained_cfg(name), "hf_hub_id", None)
    if not hub_id or any(isinstance(try_to_load_from_cache(hub_id, file), str) for file in WEIGHTS):
        return
    try:
        HfApi().model_info(hub_id, timeout=HUB_SECONDS)
    except Exception as error:  # not found, no network, HF_HUB_OFFLINE: the library raises many types
        raise ConfigError(
            f"the trained weights of timm:{name} are not on this machine, and the Hugging Face hub did not answer with "
            f"'{hub_id}' ({type(error).__name__}). Build it once with a connection, or leave pretrained=True out."
        ) from None


def output_width(encoder: nn.Module, spec: str, example: Tensor) -> int:
    """Run the encoder on a batch of two and return the width of its output."""
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    try:
        with torch.no_grad():
            out = encoder(example)
    except Exception as error:  # a user's module may raise anything
        images = example.ndim == 4
        remedy = "these channels and this size, or set data.side and data.channels" if images else "this shape"
        raise ConfigError(
            f"encoder '{spec}' fails on {'images' if images else 'inputs'} of shape {tuple(example.shape[1:])}: "
            f"{_line(error)}. Choose an encoder for {remedy}."
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 2:
        got = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        remedy = "Pool or flatten its output" if isinstance(out, Tensor) else "Return only its features"
        raise ConfigError(
            f"encoder '{spec}' maps a batch of 2 to {got}, expected a tensor of shape (2, width). {remedy}."
        )
    if not out.is_meta and not bool(out.isfinite().all()):  # a meta tensor has no values
        raise ConfigError(
            f"encoder '{spec}' returns nan or inf for finite inputs of shape {tuple(example.shape[1:])}. "
            "Check its forward for divisions by 0, logarithms and square roots."
        )
    return int(out.shape[1])


def _line(error: Exception) -> str:
    """Return an error of the user's code in one line, with the place where it was raised."""
    return f"{' '.join(str(error).split()) or type(error).__name__}{place(error)}"


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse `name(key=value, ...)` with literal values, or just `name`."""
    name, bracket, options = spec.partition("(")
    if not bracket:
        return spec.strip(), {}
    try:
        call = ast.parse(f"f({options}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return name.strip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise ConfigError(f"encoder '{spec}' cannot be parsed, expected a form such as resnet10(width=16).") from None


def check_name(spec: str) -> None:
    """Raise ConfigError if this names no built-in encoder. Names with a colon are not looked up."""
    name, _ = parse_spec(spec)
    if ":" not in name:
        _factory(name)


def _factory(name: str) -> Callable[..., nn.Module]:
    if name in BUILTIN:
        return BUILTIN[name]
    source, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, BUILTIN, n=1)
        hint = f"'{near[0]}' is the nearest of" if near else "expected one of"
        raise ConfigError(
            f"unknown encoder '{name}', {hint} {', '.join(BUILTIN)}; or timm:NAME, torchvision:NAME, "
            "package.module:callable."
        )
    if source == "timm":
        return partial(load_module("timm", f"Install it: {install_command('timm')}").create_model, attribute)
    if source == "torchvision":
        models = load_module("torchvision.models", "Install it: pip install torchvision (for your torch build)")
        return partial(_torchvision, models, attribute)
    own: Callable[..., nn.Module] = find(name, "encoder")
    # An instance keeps its weights as initial weights. Each client trains a copy of it.
    return (lambda: copy.deepcopy(own)) if source == GIVEN and isinstance(own, nn.Module) else own


def _torchvision(models: Any, name: str, **options: Any) -> nn.Module:
    """Return a torchvision model without its classification layer."""
    model: nn.Module = models.get_model(name, **options)
    for head in ("fc", "classifier", "head", "heads"):
        if hasattr(model, head):
            setattr(model, head, nn.Flatten())
            break
    return model

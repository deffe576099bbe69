"""From a description such as `resnet10(width=16)` to a module that maps images to vectors.

Anything that does so is an encoder: ours, timm's, torchvision's, or any importable callable that returns
an nn.Module. Its output width is found by a dry run, never declared.
"""

import ast
import difflib
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .resnet import STAGES, ResNet
from .small import MobileNet, ViT

BUILTIN: dict[str, Callable[..., nn.Module]] = {
    **{f"resnet{depth}": partial(ResNet, depth) for depth in STAGES},
    "mobilenet": MobileNet,
    "vit": ViT,
}


def build_encoder(spec: str, in_channels: int, side: int) -> tuple[nn.Module, int]:
    """The encoder and the width of its output. Parameters come from torch's global generator."""
    name, options = parse_spec(spec)
    factory = _factory(name)
    accepted = inspect.signature(factory).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    given = {"in_channels": in_channels, "side": side}
    given = {key: value for key, value in given.items() if key in accepted}
    unknown = [key for key in options if key not in accepted and not takes_all]
    if unknown:
        names = ", ".join(key for key in accepted if key not in given)
        raise ConfigError(f"encoder '{spec}' has no option '{unknown[0]}', expected one of: {names}.")
    if name.startswith("timm:"):
        given = {"in_chans": in_channels, "num_classes": 0}
    try:
        encoder = factory(**{**given, **options})
    except Exception as error:  # a user's callable may raise anything
        raise ConfigError(f"encoder '{spec}' cannot be built: {_line(error)}. Change its options.") from None
    if not isinstance(encoder, nn.Module):
        raise ConfigError(
            f"encoder '{spec}' returned {type(encoder).__name__}, expected a torch.nn.Module. "
            "Name a class or a function that returns one."
        )
    return encoder, output_width(encoder, spec, in_channels, side)


def output_width(encoder: nn.Module, spec: str, in_channels: int, side: int) -> int:
    """Feed two blank images and look at what comes out."""
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.no_grad():
            out = encoder(torch.zeros(2, in_channels, side, side))
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"encoder '{spec}' fails on images of shape ({in_channels}, {side}, {side}): {_line(error)}. "
            "Choose an encoder for this size, or set data.side and data.channels."
        ) from None
    finally:
        encoder.train(was_training)
    if not isinstance(out, torch.Tensor) or out.ndim != 2 or len(out) != 2:
        got = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        raise ConfigError(
            f"encoder '{spec}' maps 2 images to {got}, expected a tensor of shape (2, width). "
            "Pool or flatten its output."
        )
    return int(out.shape[1])


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """`name(key=value, ...)` with literal values, or just `name`."""
    name, bracket, _ = spec.partition("(")
    if not bracket:
        return spec.strip(), {}
    try:
        call = ast.parse(f"f({spec.partition('(')[2]}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return name.strip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise ConfigError(f"encoder '{spec}' cannot be read, expected a form such as resnet10(width=16).") from None


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
        return partial(_import("timm", "pip install 'hetero-ssfl[timm]'").create_model, attribute)
    if source == "torchvision":
        models = _import("torchvision.models", "pip install torchvision (for your torch build)")
        return partial(_torchvision, models, attribute)
    found = getattr(_import(source, "put it on PYTHONPATH"), attribute, None)
    if not callable(found):
        raise ConfigError(f"encoder '{name}': module {source} has no callable '{attribute}'. Check the name.")
    return found


def _import(module: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a torchvision built for another torch fails with RuntimeError
        raise ConfigError(f"cannot import {module} ({error}). Remedy: {remedy}.") from None


def _torchvision(models: Any, name: str, **options: Any) -> nn.Module:
    """A torchvision model without its classification layer."""
    model: nn.Module = models.get_model(name, **options)
    for head in ("fc", "classifier", "head", "heads"):
        if hasattr(model, head):
            setattr(model, head, nn.Flatten())
            break
    return model

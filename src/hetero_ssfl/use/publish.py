"""Publish a trained encoder: a folder that loads without this package, and its upload to the Hugging Face hub.

model.safetensors   the weights
config.json         what the encoder is and takes; for encoders of timm, in timm's own form
encoder.py          for built-in encoders: the architecture in plain torch, with `build()`
README.md           the card: data, method, accuracy against the floors, privacy budget, how to load it
"""

import inspect
import json
import sys
from functools import partial
from pathlib import Path

from ..errors import ConfigError, RunError
from ..learning.encoders import BUILTIN, parse_spec, resnet, whitening
from .card import model_card
from .export import mark_of, read_bytes, write_all
from .models import ModelFolder

IMPORTS = '''"""{spec}, as trained by hetero-ssfl, in plain torch. Needs torch and safetensors."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
'''
BUILD = '''
def build() -> nn.Module:
    """Return the encoder with its trained weights, in evaluation mode."""
    encoder = {call}
    encoder.load_state_dict(load_file(Path(__file__).with_name("model.safetensors")))
    return encoder.eval()
'''


def write_folder(model: ModelFolder, out: Path) -> Path:
    """Write what is published. Only an earlier version for the same weights is overwritten."""
    name, _ = parse_spec(spec := str(model.card["encoder"]))
    if name not in BUILTIN and not name.startswith("timm:"):
        remedy = "Export it with --to torch-export or --to onnx instead: such files hold their architecture"
        raise ConfigError(f"encoder '{spec}' has code of its own, which is not published with its weights. {remedy}.")
    card, mark = out / "README.md", mark_of(model)
    if out.exists() and not (card.exists() and mark in read_bytes(card)):
        raise RunError(f"'{out}' exists and does not hold this model of {model.client}. Choose another output.")
    building = ["from encoder import build  # encoder.py of this repository", "encoder = build()"]
    of_timm = name.startswith("timm:")
    text = model_card(model, None, {"safetensors": "model.safetensors"}, None if of_timm else building)
    contents = {
        out / "model.safetensors": read_bytes(model.path / "encoder.safetensors"),
        out / "config.json": json.dumps(config_of(model), indent=2).encode() + b"\n",
        card: text.encode() + mark,
    }
    if not of_timm:
        contents[out / "encoder.py"] = source_of(spec, model.shape[0], model.shape[-1]).encode()
    write_all(contents)
    return out


def config_of(model: ModelFolder) -> dict[str, object]:
    """Return the content of config.json. The entries of timm let it load the model by the name of its repository."""
    name, options = parse_spec(str(model.card["encoder"]))
    about = {key: model.card.get(key) for key in ("encoder", "parameters", "input", "method", "round", "seed")}
    if not name.startswith("timm:"):
        return {"model_type": "hetero-ssfl", **about}
    mean, std = ([value] * model.shape[0] for value in model.normalisation)
    takes = {"input_size": list(model.shape), "mean": mean, "std": std, "num_classes": 0}
    arguments = {"in_chans": model.shape[0], **options}
    own = {"architecture": name.partition(":")[2], "num_classes": 0, "model_args": arguments, "pretrained_cfg": takes}
    return {**own, "hetero_ssfl": about}


def source_of(spec: str, channels: int, side: int) -> str:
    """Return a module with the classes of a built-in encoder and a function that builds it."""
    name, options = parse_spec(spec)
    factory = BUILTIN[name]
    made, first = (factory.func, factory.args) if isinstance(factory, partial) else (factory, ())
    given = {"in_channels": channels, "side": side}
    options = {**{key: value for key, value in given.items() if key in inspect.signature(made).parameters}, **options}
    arguments = [*map(repr, first), *(f"{key}={value!r}" for key, value in options.items())]
    modules = dict.fromkeys([resnet, sys.modules[made.__module__]])
    parts = [inspect.getsource(part) for part in (whitening.Whitening, whitening.whitened, whitening.pooled)]
    parts += [_without_imports(inspect.getsource(module)) for module in modules]
    call = f"{made.__name__}({', '.join(arguments)})"
    return "\n\n".join([IMPORTS.format(spec=name), *parts, BUILD.format(call=call)])


def _without_imports(source: str) -> str:
    lines = source.split('"""\n', 1)[1].splitlines()  # without the docstring of the module
    return "\n".join(line for line in lines if not line.startswith(("from ", "import "))).strip() + "\n"


def upload(folder: Path, name: str, public: bool = False) -> str:
    """Upload a folder to a model repository of the hub, private by default; return its address."""
    from huggingface_hub import HfApi

    try:
        repository = HfApi().create_repo(name, private=not public, exist_ok=True)
        HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Publish an encoder")
    except Exception as error:  # of the hub's package, or of what it sends with
        reason = " ".join(str(error).split())[:300]
        remedy = "Log in with `hf auth login` or set HF_TOKEN, and check the name OWNER/MODEL and your connection"
        raise ConfigError(f"cannot publish '{name}': {reason}. {remedy}. The folder '{folder}' is complete.") from None
    return str(repository)

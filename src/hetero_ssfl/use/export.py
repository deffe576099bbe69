"""Export a trained encoder for other programs as safetensors, torch.export or ONNX, with a model card.

A torch.export or ONNX model includes the normalisation and takes images with values from 0 to 1. Before it is written,
it is checked to give the same features as the encoder.
"""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ConfigError, RunError
from ..plugins import install_command, load_module
from ..runs.files import seal_json, write_atomically
from .card import model_card
from .models import ModelFolder

TOLERANCE = 1e-4
SUFFIXES = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
Run = Callable[[Tensor], Tensor]


class Normalised(nn.Module):
    """Maps images with values from 0 to 1 to features."""

    def __init__(self, encoder: nn.Module, mean: float, std: float) -> None:
        super().__init__()
        self.encoder, self.mean, self.std = encoder, mean, std

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.encoder((images - self.mean) / self.std)
        return features


def export(model: ModelFolder, to: str, out: Path, encoder: str | None = None) -> Path:
    """Write one client's model to a folder (or a file, by its suffix), then its card; return the model's file."""
    check_format(to)
    file, card = _places(model, to, out)
    if to == "safetensors":  # unchanged weights; loading them needs the encoder's class
        content = read_bytes(model.path / "encoder.safetensors")
    else:
        content = convert(model, model.load(encoder), to)
    in_folder = card.name == "README.md"
    others = {kind: file.with_suffix(suffix) for kind, suffix in SUFFIXES.items()}
    files = {kind: path.name for kind, path in others.items() if kind == to or (in_folder and path.exists())}
    contents = {file: content, card: model_card(model, encoder, files).encode() + mark_of(model)}
    if in_folder:
        contents[card.with_name("card.json")] = seal_json(model.card)
    write_all(contents)
    return file


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Write all files. If one cannot be written, remove what this call has created."""
    places = [*contents, *{file.parent for file in contents}]
    new = [path for path in places if not path.exists()]
    try:
        for path, content in contents.items():
            write_atomically(path, content)
    except BaseException:
        for path in new:
            with suppress(OSError):  # the error that stopped the writing is the one to show
                path.rmdir() if path.is_dir() else path.unlink()
        raise


def check_format(to: str) -> None:
    if to not in SUFFIXES:
        raise ConfigError(f"unknown format '{to}', expected one of {', '.join(SUFFIXES)}.")


def _places(model: ModelFolder, to: str, out: Path) -> tuple[Path, Path]:
    """Return the paths of the model and its card. Only exports of the same model are overwritten."""
    suffix = SUFFIXES[to]
    if out.suffix in SUFFIXES.values():
        file, card, occupied = out, out.with_name(f"{out.name}.md"), out.exists()
        if out.suffix != suffix:
            raise ConfigError(f"--to {to} writes {suffix} files, but '{out}' ends in {out.suffix}. Change one of them.")
    else:
        file, card, occupied = out / f"encoder{suffix}", out / "README.md", out.is_dir() and any(out.iterdir())
    if card.exists():
        occupied = mark_of(model) not in read_bytes(card)
    if occupied:
        raise RunError(f"'{out}' exists and is not an export of this model of {model.client}. Choose another output.")
    return file, card


def mark_of(model: ModelFolder) -> bytes:
    """Return a line with a digest of the weights, which identifies a card of this model."""
    return f"\n<!-- {sha256(read_bytes(model.path / 'encoder.safetensors')).hexdigest()} -->\n".encode()


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read '{path}': {error.strerror}. Restore it from a copy.") from None


def convert(model: ModelFolder, encoder: nn.Module, to: str) -> bytes:
    """Return the file content for the encoder with its normalisation, checked to give the same features."""
    module = Normalised(encoder, *model.normalisation).eval()
    if to == "onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            load_module(name, f"Install it: {install_command('onnx')}")
    make, run = (_onnx, _run_onnx) if to == "onnx" else (_torch_export, _run_torch_export)
    try:
        with _without_noise(), torch.no_grad():
            content = make(module, torch.rand(3, *model.shape), json.dumps(model.card))
    except Exception as error:  # a user's module may contain anything, and each exporter has its own exceptions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" .")[:200]
        what = f"encoder '{model.card['encoder']}' cannot be exported to {to}: {reason}"
        raise ConfigError(f"{what}. Its forward may depend on values; --to safetensors always works.") from None
    _compare(module, run(content), model.shape, to)
    return content


def _compare(module: nn.Module, run: Run, shape: tuple[int, ...], to: str) -> None:
    """Compare features on batches of several sizes: the largest difference relative to max(1, largest feature)."""
    for count in (1, 2, 5):
        images = torch.rand(count, *shape, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            expected, features = module(images), run(images)
        difference = float("inf")
        if features.shape == expected.shape:
            difference = float((expected - features).abs().max()) / max(1.0, float(expected.abs().max()))
        if not difference <= TOLERANCE:
            what = f"features of the {to} file differ from the encoder's by {difference:.1e}, expected {TOLERANCE:g}"
            raise RunError(f"{what} at most, so it was not written. Use another format.")


def _torch_export(module: nn.Module, example: Tensor, card: str) -> bytes:
    program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"card.json": card})
    return buffer.getvalue()


def _run_torch_export(content: bytes) -> Run:
    return torch.export.load(io.BytesIO(content)).module()


def _onnx(module: nn.Module, example: Tensor, card: str) -> bytes:
    import onnx

    names = {"input_names": ["images"], "output_names": ["features"]}
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.onnx.export(module, (example,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {"hetero_ssfl": card})
    return bytes(proto.SerializeToString())


def _run_onnx(content: bytes) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextmanager
def _without_noise() -> Iterator[None]:
    """Silence exporters, which warn about deprecations and missing packages and print graphs when they fail."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        quiet = warnings.catch_warnings(action="ignore")
        with quiet, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)

"""Embed images with trained encoders, one batch in memory at a time, and save the features to one file."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn

from ..config import DataConfig, validate
from ..data import Data, float_images_remedy, is_pixels, read_given
from ..data.images import SourceImage, each_image
from ..errors import ConfigError, DataError
from ..learning.features import extract_features
from ..runs.files import write_atomically
from ..terminal import Console
from .models import ModelFolder

BATCH = 256
FORMATS = (".parquet", ".npy")
OnBad = Literal["error", "skip"]


@dataclass(frozen=True)
class Embedded:
    """The row and path of each image in its source, and its features by each encoder."""

    rows: list[int]
    paths: list[str | None]
    features: list[Tensor]


def check_output(path: Path) -> None:
    """Check the output's format before the work starts."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"cannot write features to '{path}', expected a name that ends in {' or '.join(FORMATS)}.")


def open_images(model: ModelFolder, source: str, on_bad_image: OnBad = "error") -> tuple[int, Iterator[SourceImage]]:
    """Return the number of images in a source, and an iterator over them in the model's input shape."""
    if not (model.takes_images and model.shape[0] in (1, 3)):
        what = f"{model.client}'s encoder takes inputs of shape {model.shape}, not square images of 1 or 3 channels"
        raise ConfigError(f"{what}. Use it from Python, with arrays.")
    takes = {"channels": model.shape[0], "side": model.shape[-1]}
    takes |= {key: model.card["input"][key] for key in ("bit_depth", "window", "axis") if key in model.card["input"]}
    return each_image(validate({"source": source, "on_bad_image": on_bad_image, **takes}, DataConfig))


def embed(encoders: Sequence[nn.Module], images: Iterable[SourceImage], count: int, console: Console) -> Embedded:
    """Compute the features of all images with each encoder. Bad images may be skipped, so `count` is an upper limit."""
    shown = track(images, "embedding", count, console=console, transient=True, disable=not console.is_terminal)
    rows: list[int] = []
    paths: list[str | None] = []
    parts: list[list[Tensor]] = [[] for _ in encoders]
    remaining = iter(shown)
    while batch := list(islice(remaining, BATCH)):
        rows += [image.row for image in batch]
        paths += [image.path for image in batch]
        pixels = torch.stack([image.pixels for image in batch])
        for encoder, features in zip(encoders, parts, strict=True):
            features.append(extract_features(encoder, pixels))
    if not rows:
        raise DataError("there are no readable images, expected at least one. Check --images.")
    return Embedded(rows, paths, [torch.cat(features) for features in parts])


def embed_data(encoders: Mapping[str, nn.Module], data: Data, rad: Tensor, config: DataConfig) -> Embedded:
    """Compute the features of data of any kind, which are brought to the shape of the run's RAD, with each encoder."""
    config = as_in_run(config, rad)
    if isinstance(data, (str, Path)):
        if rad.shape[1] not in (1, 3):
            raise DataError(f"the run's images have {rad.shape[1]} channels, those of '{data}' 1 or 3. Pass an array.")
        total, pictures = each_image(config.model_copy(update={"source": str(data)}))
        return embed(list(encoders.values()), pictures, total, Console(stderr=True))
    samples = read_given(data, None, config, "the new data").pixels
    check_alike(samples, rad)
    features = [extract_features(encoder, samples) for encoder in encoders.values()]
    return Embedded(list(range(len(samples))), [None] * len(samples), features)


def as_in_run(config: DataConfig, rad: Tensor) -> DataConfig:
    """Return settings to read all of other data, with images in the shape of the run's RAD."""
    images = {"channels": rad.shape[1], "side": rad.shape[-1]} if is_pixels(rad.dtype) else {}
    return config.model_copy(update={"image_column": None, "label_column": None, "limit": None, **images})


def check_alike(samples: Tensor, rad: Tensor) -> None:
    """Raise DataError unless new data are of the kind and shape of the run's own. Images may have 8 or 16 bits."""
    if samples.shape[1:] != rad.shape[1:]:
        shape, expected = tuple(samples.shape[1:]), tuple(rad.shape[1:])
        raise DataError(f"the new data have samples of shape {shape}, expected {expected} as in the run. Convert them.")
    if is_pixels(samples.dtype) != is_pixels(rad.dtype):
        remedy = float_images_remedy(samples) or "Convert them."
        raise DataError(f"the new data are {samples.dtype}, but the run's are {rad.dtype}. {remedy}")


def save_features(path: Path, embedded: Embedded, model: ModelFolder) -> None:
    """Save Parquet with columns row, path (null in tables) and feature (a list), or NumPy with only the features."""
    values, buffer = embedded.features[0].numpy(), io.BytesIO()
    if path.suffix == ".npy":
        np.save(buffer, values, allow_pickle=False)
    else:
        import pyarrow as pa
        from pyarrow.parquet import write_table

        vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        rows, paths = pa.array(embedded.rows, pa.int64()), pa.array(embedded.paths, pa.string())
        table = pa.table({"row": rows, "path": paths, "feature": vectors})
        write_table(table.replace_schema_metadata({"hetero_ssfl": json.dumps(model.card)}), buffer)
    write_atomically(path, buffer.getvalue())

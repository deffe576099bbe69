"""Read data passed from Python (arrays, tensors, torch Datasets, or the name of a source) into memory.

uint8 and uint16 mean pixels. Any other type (measurements, features, token numbers) goes to the networks unchanged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ..config import DataConfig
from ..errors import DataError
from .decoding import fit_image
from .images import Images, Skipped, load_images
from .pixels import as_images, is_pixels
from .sources import IMAGE_COLUMNS, LABEL_COLUMNS, fixed_fifth

Data: TypeAlias = Any
"""A folder, file or data-set id (str or Path), numpy array, tensor, list of arrays or PIL images, or torch Dataset."""

NOT_SAMPLES = {"DataLoader", "dict", "DataFrame"}
"""Class names of objects that do not hold data sample by sample. Their libraries need not be installed."""


def read_given(data: Data, labels: Any, config: DataConfig, who: str) -> Images:
    """Read all samples, with labels if there are any."""
    if isinstance(data, (str, Path)):
        config = _source(data, config)
        if labels is not None:
            images = load_images(config, "all")
            return _labeled(images.pixels, labels, who, images.skipped)
        train = load_images(config, "train")
        return train if train.labels is None else joined([train, load_images(config, "test")])
    inputs, own_labels = _samples(data, who)
    return _labeled(_as_tensor(inputs, config, who), own_labels if labels is None else labels, who)


def read_with_test(data: Data, labels: Any, test: Data, config: DataConfig, who: str) -> tuple[Images, Images]:
    """Return training and test data. Test data is `test`, the source's own test split, or a fixed fifth of the data.

    Without labels nothing can be tested, so all data is for training. Unreadable images are counted only once.
    """
    if test is not None:
        test_data, test_labels = test if isinstance(test, tuple) and len(test) == 2 else (test, None)
        held_out = read_given(test_data, test_labels, config, f"{who} (test)")
        if held_out.labels is None:
            raise DataError(f"the test data of {who} have no labels. Pass test=(data, labels), or omit test.")
        return read_given(data, labels, config, who), held_out
    if isinstance(data, (str, Path)) and labels is None:
        source = _source(data, config)
        train = load_images(source, "train")
        if train.labels is not None:
            return train, load_images(source, "test")
    images = read_given(data, labels, config, who)
    if images.labels is None:
        return images, replace(images.subset(torch.arange(0)), skipped=())
    train_rows, test_rows = (fixed_fifth(len(images), split) for split in ("train", "test"))
    return images.subset(train_rows), replace(images.subset(test_rows), skipped=())


def read_rad(data: Data, config: DataConfig) -> Tensor:
    """Read the RAD; labels are not needed. Only a source's training split is used: tests may use the rest."""
    if isinstance(data, (str, Path)):
        return load_images(_source(data, config.model_copy(update={"label_column": None})), "train").pixels
    return read_given(data, None, config, "the RAD").pixels


def _source(data: str | Path, config: DataConfig) -> DataConfig:
    if isinstance(data, Path) and not data.expanduser().exists():
        raise DataError(f"there is no file or folder '{data}'. Check the path.")
    return config.model_copy(update={"source": str(data)})


def joined(parts: Sequence[Images]) -> Images:
    """Concatenate the parts. If some parts have labels, those without are dropped."""
    parts = agree_on_classes(parts)
    labeled = [part for part in parts if part.labels is not None]
    pixels = torch.cat([part.pixels for part in labeled or parts])
    labels = torch.cat([part.labels for part in labeled if part.labels is not None]) if labeled else None
    return Images(pixels, labels, parts[0].classes, sum((part.skipped for part in parts), ()))


def agree_on_classes(parts: Sequence[Images]) -> list[Images]:
    """Renumber labels so that a class, identified by its name, has the same number in all parts."""
    names = {name for part in parts for name in part.classes}
    classes = tuple(sorted(names, key=lambda name: (not name.isdecimal(), len(name) if name.isdecimal() else 0, name)))
    place = {name: number for number, name in enumerate(classes)}
    numbers = [torch.tensor([place[name] for name in part.classes]) for part in parts]
    labels = [None if part.labels is None else own[part.labels] for part, own in zip(parts, numbers, strict=True)]
    return [replace(part, labels=own, classes=classes) for part, own in zip(parts, labels, strict=True)]


def _samples(data: Data, who: str) -> tuple[Any, list[Any] | None]:
    """Return an array or a list of samples, and the labels if a Dataset has them."""
    if isinstance(data, (np.ndarray, Tensor)):
        return data, None
    listed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)
    kinds = {kind.__name__ for kind in type(data).__mro__}
    if kinds & NOT_SAMPLES or not (listed or isinstance(data, Iterable)):
        expected = "a folder, a data-set id, an array, a tensor or a torch Dataset (such as the .dataset of a loader)"
        raise DataError(f"the data of {who} are a {type(data).__name__}, expected {expected}. Convert them.")
    # A Dataset need not be iterable; one that is may not stop at its length.
    items = [data[k] for k in range(len(data))] if listed else list(data)
    if not items:
        raise DataError(f"the data of {who} are empty, expected at least 2 samples. Check what was loaded.")
    if isinstance(items[0], dict):
        image = next((name for name in IMAGE_COLUMNS if name in items[0]), None)
        label = next((name for name in LABEL_COLUMNS if name in items[0]), None)
        if image is None:
            raise DataError(f"items of {who} have keys {sorted(items[0])}, expected {' or '.join(IMAGE_COLUMNS)}.")
        return [item[image] for item in items], [item[label] for item in items] if label else None
    if isinstance(items[0], (tuple, list)):
        if len(items[0]) not in (1, 2):
            raise DataError(f"items of {who} have {len(items[0])} parts, expected a sample, or a sample and its label.")
        return [item[0] for item in items], [item[1] for item in items] if len(items[0]) == 2 else None
    return items, None


def _as_tensor(inputs: Any, config: DataConfig, who: str) -> Tensor:
    if isinstance(inputs, list):
        inputs = _stacked(inputs, config, who)
    tensor = inputs.detach().cpu() if isinstance(inputs, Tensor) else _from_numpy(inputs, who)
    if tensor.ndim < 2:
        raise DataError(f"the data of {who} have shape {tuple(tensor.shape)}, expected (samples, ...). Add an axis.")
    if len(tensor) < 2:
        raise DataError(f"{who} has {len(tensor)} samples, expected at least 2. Add some.")
    if is_pixels(tensor.dtype):
        return as_images(tensor, config, who)
    if tensor.is_floating_point():
        tensor = tensor.float()
        if not bool(tensor.isfinite().all()):
            raise DataError(f"the data of {who} have values that are not finite, expected numbers. Clean them first.")
    return tensor.contiguous()


def _from_numpy(array: np.ndarray, who: str) -> Tensor:
    native = array.dtype.newbyteorder("=")  # torch refuses the other byte order, which TIFF and FITS readers return
    try:
        return torch.from_numpy(np.require(array, native, ["C", "W"]))  # copied only if torch cannot share memory
    except TypeError:
        raise DataError(f"the data of {who} are an array of {array.dtype}, expected numbers. Convert them.") from None


def _stacked(samples: Sequence[Any], config: DataConfig, who: str) -> Any:
    """Stack samples of one shape into one array; images of several sizes need `data.side`."""
    from PIL.Image import Image

    if isinstance(samples[0], Image):
        channels = config.channels or len(fit_image(samples[0], config.side, None, config.bit_depth))
        samples = [fit_image(sample, config.side, channels, config.bit_depth) for sample in samples]
    elif not isinstance(samples[0], (np.ndarray, Tensor)):
        found = f"a sample of {who} is a {type(samples[0]).__name__}"
        raise DataError(f"{found}, expected an array, a tensor or a PIL image. Convert it, or pass a folder's path.")
    else:
        samples = [np.asarray(sample) for sample in samples]
        if config.side and samples[0].dtype in (np.uint8, np.uint16):
            samples = [as_images(_from_numpy(s[None], who), config, who)[0].numpy() for s in samples]
    for number, sample in enumerate(samples):
        if sample.shape != samples[0].shape:
            found = f"sample {number} of {who} has shape {tuple(sample.shape)}, but the first has {samples[0].shape}"
            raise DataError(f"{found}. Make them alike; for images, settings={{'data.side': 32}} resizes all.")
    return np.stack(samples)


def _labeled(inputs: Tensor, labels: Any, who: str, skipped: tuple[Skipped, ...] = ()) -> Images:
    if labels is None:
        return Images(inputs, None, skipped=skipped)
    values = labels.tolist() if isinstance(labels, (np.ndarray, Tensor)) else list(labels)
    if len(values) != len(inputs):
        raise DataError(f"{who} has {len(inputs)} samples and {len(values)} labels, expected one for each. Check both.")
    values = [value.item() if isinstance(value, (np.generic, Tensor)) else value for value in values]
    odd = next((value for value in values if not isinstance(value, (int, str)) or isinstance(value, bool)), None)
    if odd is not None:
        raise DataError(f"a label of {who} is {odd!r}, expected a whole number or a word for each class. Convert them.")
    classes = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    numbers = {value: number for number, value in enumerate(classes)}
    return Images(inputs, torch.tensor([numbers[value] for value in values]), tuple(map(str, classes)), skipped)

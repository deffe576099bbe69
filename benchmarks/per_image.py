"""Random views of single images with PIL, as in most self-supervised examples: the baseline of two benchmarks.

The changes are those of `hetero_ssfl.data.random_view` with default settings, implemented as in torchvision for PIL
images: a crop of random area and aspect, mirroring, brightness, contrast, saturation and hue in random order, and
sometimes grayscale.
"""

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.utils.data import Dataset

from hetero_ssfl.config import ViewsConfig
from hetero_ssfl.data.views import MEAN, STD


def pil_view(image: Image.Image, config: ViewsConfig) -> Tensor:
    """Return a random view of the image as network input."""
    side = image.width
    image = image.resize((side, side), Image.Resampling.BILINEAR, box=random_box(side, config.crop))
    if random.random() < config.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if random.random() < config.jitter:
        image = jitter(image, config)
    if random.random() < config.grayscale:
        image = image.convert("L").convert("RGB")
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return tensor.float().div_(255).sub_(MEAN).div_(STD)


def random_box(side: int, crop: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom. Tries ten times to find an aspect that fits, as torchvision does."""
    for _ in range(10):
        area = side * side * random.uniform(*crop)
        ratio = math.exp(random.uniform(-math.log(4 / 3), math.log(4 / 3)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if width <= side and height <= side:
            left, top = random.randint(0, side - width), random.randint(0, side - height)
            return left, top, left + width, top + height
    return 0, 0, side, side


def jitter(image: Image.Image, config: ViewsConfig) -> Image.Image:
    changes: list[Callable[[Image.Image], Image.Image]] = [
        lambda x: ImageEnhance.Brightness(x).enhance(factor(config.brightness)),
        lambda x: ImageEnhance.Contrast(x).enhance(factor(config.contrast)),
        lambda x: ImageEnhance.Color(x).enhance(factor(config.saturation)),
        lambda x: turn_hue(x, random.uniform(-config.hue, config.hue)),
    ]
    random.shuffle(changes)
    for change in changes:
        image = change(image)
    return image


def factor(spread: float) -> float:
    return random.uniform(1 - spread, 1 + spread)


def turn_hue(image: Image.Image, turn: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    hues = np.asarray(hue) + np.uint8(round(turn * 255) % 256)  # wraps around, as hues do
    return Image.merge("HSV", (Image.fromarray(hues), saturation, value)).convert("RGB")


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two random views of each image, made one image at a time."""

    def __init__(self, pixels: Tensor, config: ViewsConfig) -> None:
        self.images = [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).numpy()]
        self.config = config

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return pil_view(self.images[row], self.config), pil_view(self.images[row], self.config)

"""Make random views of a whole batch at once.

All geometric changes (crop, flip, rotation, shear, shift) of an image combine into one affine map, so one `grid_sample`
applies them. All colour changes (brightness, contrast, saturation, hue, grayscale) are affine maps of colour space, so
they multiply into one 3x4 matrix per image. Unlike in per-image PIL pipelines, values are clamped once at the end and
not after each change, and hue rotates the YIQ plane instead of HSV's hexagon.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..config import ViewsConfig
from ..errors import ConfigError
from ..plugins import find
from .pixels import GREY, is_pixels, to_unit_range

MEAN, STD = 0.5, 0.25  # the same for every client and data set, so that they reveal nothing about private data
CORNER = 13 / 16  # the side of a corner crop, of the image's

YIQ = torch.tensor([GREY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])


@lru_cache(maxsize=8)
def _colour_constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of a grey value, the map to YIQ and its inverse on a device, copied there once."""
    return YIQ[0].to(device), YIQ.to(device), torch.linalg.inv(YIQ).to(device)


@dataclass(frozen=True)
class _Draw:
    """Draw one random number per image, on the CPU so that every device gives the same views."""

    n: int
    rng: Generator
    device: torch.device

    def uniform(self, low: float, high: float) -> Tensor:
        return (torch.rand(self.n, generator=self.rng) * (high - low) + low).to(self.device, non_blocking=True)

    def chosen(self, probability: float) -> Tensor:
        return (torch.rand(self.n, generator=self.rng) < probability).to(self.device, non_blocking=True)


def to_input(data: Tensor) -> Tensor:
    """Convert pixels to network input; data of other types is returned unchanged."""
    if not is_pixels(data.dtype):
        return data
    return to_unit_range(data).sub_(MEAN).div_(STD).contiguous(memory_format=torch.channels_last)


def ten_crop(images: Tensor, config: ViewsConfig) -> list[Tensor]:
    """Return the images; if random views crop, also their corners at full size; if they flip, the mirror images of all.
    Beside own views there are only the images."""
    crops, (height, width) = [images], images.shape[2:]
    if config.function:
        return crops
    if config.crop[0] <= CORNER**2:
        y, x = round(CORNER * height), round(CORNER * width)
        corners = [images[:, :, :y, :x], images[:, :, :y, -x:], images[:, :, -y:, :x], images[:, :, -y:, -x:]]
        crops += [F.interpolate(corner, (height, width), mode="bilinear", align_corners=False) for corner in corners]
    return crops + [crop.flip(3) for crop in crops] if config.flip else crops


def random_view(pixels: Tensor, config: ViewsConfig, rng: Generator) -> Tensor:
    """Return one random view of each image as network input, on the device of `pixels`."""
    if config.function:
        return own_view(pixels, config.function, rng)
    draw = _Draw(len(pixels), rng, pixels.device)
    view = to_unit_range(pixels)
    theta = _affine_maps(config, draw)
    if theta is not None:
        grid = _grid(theta, view.shape[-1])
        # A shift or rotation uncovers black pixels. A crop stays inside the image, so its edge must not fade.
        padding = "zeros" if config.rotate or config.translate or config.shear else "border"
        view = F.grid_sample(view, grid, mode="bilinear", padding_mode=padding, align_corners=False)
    if config.jitter or config.grayscale:
        view = _recolour(view, config, draw)
    if config.blur:
        view = torch.where(draw.chosen(config.blur)[:, None, None, None], _blur(view, draw), view)
    if config.solarize:
        flipped = torch.where(view >= 0.5, 1 - view, view)
        view = torch.where(draw.chosen(config.solarize)[:, None, None, None], flipped, view)
    return view.sub_(MEAN).div_(STD).contiguous(memory_format=torch.channels_last)


def own_view(data: Tensor, spec: str, rng: Generator) -> Tensor:
    """Make views with the user's function. It gets images in [0, 1], which are normalised afterwards, or raw data."""
    pictures = is_pixels(data.dtype)
    view = find(spec, "views.function")(to_unit_range(data) if pictures else data.clone(), rng)
    if not isinstance(view, Tensor) or len(view) != len(data):
        got = f"{len(view)} rows" if isinstance(view, Tensor) else f"a {type(view).__name__}"
        raise ConfigError(
            f"views.function = '{spec}' returned {got} for a batch of {len(data)}, expected a tensor with as many "
            "rows. Return one view of each sample."
        )
    return (view - MEAN).div_(STD).contiguous(memory_format=torch.channels_last) if pictures else view


def _affine_maps(config: ViewsConfig, draw: _Draw) -> Tensor | None:
    """Return each image's map from output to input coordinates (both in [-1, 1]), or None if nothing moves."""
    if config.crop == (1.0, 1.0) and not (config.flip or config.rotate or config.translate or config.shear):
        return None
    area = draw.uniform(*config.crop)
    spread = 0.0 if config.crop == (1.0, 1.0) else math.log(4 / 3)  # without a crop the aspect ratio stays
    ratio = torch.exp(draw.uniform(-spread, spread))
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    shift_x = (1 - width) * draw.uniform(-1, 1) + 2 * config.translate * draw.uniform(-1, 1)
    shift_y = (1 - height) * draw.uniform(-1, 1) + 2 * config.translate * draw.uniform(-1, 1)
    mirror = 1 - 2 * draw.chosen(config.flip).float()
    angle = torch.deg2rad(draw.uniform(-config.rotate, config.rotate))
    slant = torch.tan(torch.deg2rad(draw.uniform(-config.shear, config.shear)))
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([cos * width * mirror, (slant * cos - sin) * height, shift_x], 1)
    row_y = torch.stack([sin * width * mirror, (slant * sin + cos) * height, shift_y], 1)
    return torch.stack([row_x, row_y], 1)


def _grid(theta: Tensor, side: int) -> Tensor:
    """Return `F.affine_grid(theta, ..., align_corners=False)`, bit for bit, without a copy of the grid per image."""
    line = torch.linspace(-1, 1, side, device=theta.device) * (side - 1) / side
    y, x = torch.meshgrid(line, line, indexing="ij")
    positions = torch.stack([x, y, torch.ones_like(x)], 2).view(1, side * side, 3)
    return (positions.expand(len(theta), -1, -1) @ theta.mT).view(-1, side, side, 2)


def _recolour(view: Tensor, config: ViewsConfig, draw: _Draw) -> Tensor:
    """Apply brightness, contrast, saturation, hue and grayscale as one matrix and offset per image.

    Only images of three channels have colours. All others get brightness and contrast, the same for all channels.
    """
    jittered = draw.chosen(config.jitter)

    def factor(spread: float) -> Tensor:
        return torch.where(jittered, draw.uniform(1 - spread, 1 + spread), 1.0)[:, None, None]

    bright, contrast, saturation = map(factor, (config.brightness, config.contrast, config.saturation))
    turn = torch.where(jittered, draw.uniform(-config.hue, config.hue) * 2 * math.pi, 0.0)
    to_grey = draw.chosen(config.grayscale)[:, None, None]
    if view.shape[1] != 3:
        flat = view.reshape(len(view), 1, -1)
        mean = flat.mean(2, keepdim=True)
        return ((flat - mean) * contrast + mean).mul_(bright).clamp_(0, 1).view_as(view)
    flat = view.flatten(2)
    weights, *_ = _colour_constants(view.device)
    grey, identity = weights.expand(3, 3), torch.eye(3, device=view.device)
    matrix = bright * (saturation * identity + (1 - saturation) * grey)
    matrix = torch.where(to_grey, grey @ matrix, _hue_turn(turn) @ matrix)
    mean = matrix @ flat.mean(2, keepdim=True)
    level = (1 - contrast) * (weights @ mean).unsqueeze(1)  # contrast moves a pixel away from the image's mean grey
    return torch.baddbmm(level, contrast * matrix, flat).clamp_(0, 1).view_as(view)


def _hue_turn(angle: Tensor) -> Tensor:
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(-1, 3, 3)
    _, yiq, from_yiq = _colour_constants(angle.device)
    return from_yiq @ turn @ yiq


def _blur(view: Tensor, draw: _Draw) -> Tensor:
    """Apply Gaussian blur with one sigma per image: 0.1 to 2 at 224 px, scaled to the side."""
    n, channels, side, _ = view.shape
    radius = max(1, round(side * 0.05))
    sigma = (draw.uniform(0.1, 2.0) * side / 224).clamp(min=0.05)
    offsets = torch.arange(-radius, radius + 1, device=view.device)
    kernel = torch.exp(-(offsets**2) / (2 * sigma[:, None] ** 2))
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(channels, 0)
    flat = F.pad(view.reshape(1, n * channels, side, side), [radius] * 4, mode="reflect")
    flat = F.conv2d(flat, kernel[:, None, None, :], groups=n * channels)
    return F.conv2d(flat, kernel[:, None, :, None], groups=n * channels).view_as(view)

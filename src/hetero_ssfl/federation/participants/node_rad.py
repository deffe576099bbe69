"""The RAD on a participant's disk: sent once, identified by its digest."""

import logging
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ...data import digest
from ...errors import DamagedError, ProtocolError
from ...runs.files import load_tensors, save_tensors
from ..wire import check_hex
from .node_settings import NodeSettings

log = logging.getLogger(__name__)

MAX_RADS = 3


def find_rad(node: NodeSettings, wanted: str) -> Tensor | None:
    """Return the RAD with this digest, or None if it is not on this disk or is damaged."""
    path = _rad_file(node, wanted)
    if not path.exists():
        return None
    with suppress(DamagedError, KeyError):
        pixels = load_tensors(path)[0]["pixels"]
        if digest(pixels) == wanted:
            return pixels
    log.warning("the RAD %s on disk does not match its digest; asking for it again", wanted[:12])
    path.unlink()
    return None


def check_rad(node: NodeSettings, wanted: str, pixels: Tensor) -> None:
    """Raise ProtocolError unless a received RAD is within this node's limits and matches its digest."""
    shape = tuple(pixels.shape)
    if pixels.dtype != torch.uint8 or len(shape) != 4 or shape[1] not in (1, 3) or shape[2] != shape[3] or 0 in shape:
        images = "uint8 images (n, 1 or 3, side, side)"
        raise ProtocolError(f"the RAD sent to {node.name} is {pixels.dtype} of shape {shape}, expected {images}.")
    _check_side(node, shape[2])
    node.check_limit("rad_images", len(pixels))
    if digest(pixels) != wanted:
        raise ProtocolError(f"the RAD sent to {node.name} does not match its digest {wanted[:12]}. Send it again.")


def save_rad(node: NodeSettings, wanted: str, pixels: Tensor) -> None:
    """Save a checked RAD, and delete old ones."""
    save_tensors(_rad_file(node, wanted), {"pixels": pixels})
    by_age = sorted((node.home / "rad").glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    for old in by_age[:-MAX_RADS]:
        old.unlink(missing_ok=True)


def blank_rad(node: NodeSettings, channels: object, side: object) -> Tensor:
    """Return one blank image, which stands for a RAD that has not arrived yet."""
    if type(channels) is not int or channels not in (1, 3) or type(side) is not int or side < 1:
        named = f"{str(channels)[:12]} channels and side {str(side)[:12]}"
        raise ProtocolError(f"the server names a RAD with {named}, expected 1 or 3 and at least 1.")
    _check_side(node, side)
    return torch.zeros(1, channels, side, side, dtype=torch.uint8)


def _check_side(node: NodeSettings, side: int) -> None:
    if side > node.limits.image_side:
        limit = f"the limit of {node.name} is {node.limits.image_side} (limits.image_side)"
        raise ProtocolError(f"the RAD has images of {str(side)[:12]} pixels, {limit}. Set data.side in the config.")


def _rad_file(node: NodeSettings, wanted: str) -> Path:
    return node.home / "rad" / f"{check_hex('RAD', wanted, 64)}.safetensors"

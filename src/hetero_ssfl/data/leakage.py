"""Nobody is tested on what anybody trains on."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from ..errors import DataError
from .images import Images

log = logging.getLogger(__name__)


def without_trained(held_out: Mapping[str, Images], trained: Mapping[str, Tensor]) -> dict[str, Images]:
    """The held-out parts less every sample that is trained on too, bit for bit. Keys are words for messages.

    Real data have a few duplicates, which are left out with a warning; a part that would be empty is a mistake.
    """
    digests = {part: list(_digests(images.pixels)) for part, images in held_out.items()}
    wanted = {digest for part in digests.values() for digest in part}
    places: dict[bytes, str] = {}
    for place, samples in trained.items() if wanted else ():
        for digest in _digests(samples):
            if digest in wanted:
                places.setdefault(digest, place)
    kept = {}
    for part, images in held_out.items():
        rows = [k for k, digest in enumerate(digests[part]) if digest not in places]
        kept[part] = images
        if len(rows) == len(images):
            continue
        where = _listed(sorted({places[digest] for digest in digests[part] if digest in places}))
        if not rows:
            raise DataError(
                f"all {len(images)} {part} also occur in {where}, so they would measure nothing. "
                "Hold out others (test=, data.validation), or keep these out of the training."
            )
        log.warning("%d of %d %s also occur in %s and are left out", len(images) - len(rows), len(images), part, where)
        kept[part] = images.subset(torch.tensor(rows))
    return kept


def _digests(samples: Tensor) -> Iterator[bytes]:
    return (blake2b(sample.tobytes(), digest_size=16).digest() for sample in samples.numpy())


def _listed(words: Sequence[str]) -> str:
    return " and ".join(words if len(words) < 4 else [*words[:2], f"{len(words) - 2} others"])

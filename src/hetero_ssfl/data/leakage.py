"""Keep training samples out of the held-out data."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from ..errors import DataError
from .images import Images

log = logging.getLogger(__name__)


def without_trained(held_out: Mapping[str, Images], trained: Mapping[str, Tensor]) -> dict[str, Images]:
    """Remove from the held-out parts every sample that is bit-identical to a training sample.

    Keys describe the parts in messages. Real data contain a few duplicates, which are removed with a warning; a part
    that would become empty is an error.
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
                "Hold out other samples (test=, data.validation), or remove these from the training data."
            )
        log.warning("%d of %d %s also occur in %s and are left out", len(images) - len(rows), len(images), part, where)
        kept[part] = images.subset(torch.tensor(rows))
    return kept


def _digests(samples: Tensor) -> Iterator[bytes]:
    return (blake2b(sample.tobytes(), digest_size=16).digest() for sample in samples.numpy())


def _listed(words: Sequence[str]) -> str:
    return " and ".join(words if len(words) < 4 else [*words[:2], f"{len(words) - 2} others"])

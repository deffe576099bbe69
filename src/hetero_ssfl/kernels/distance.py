"""The alignment term's distance between a client's kernel and the mean kernel, on some RAD rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import AlignmentConfig
from .cka import at_least_float32, centre, cka, cka_debiased, factor_cka, gram

# --- the alignment term of a client's loss ---------------------------------------------------------


def alignment_distance(live: Tensor, consensus: Tensor, config: AlignmentConfig, rows: int | None = None) -> Tensor:
    """Return distance(K_k, K_mean) on some RAD rows: `live` (n x d) with gradient, `consensus` (n x r) rows of B.

    If only the first `rows` have a gradient, the neighbourhoods of the others are not compared: they would only lower
    the weight of the first. With `coordinates`, both are vectors in the space of the coordinates.
    """
    with torch.autocast(live.device.type, enabled=False):
        live, consensus = at_least_float32(live), at_least_float32(consensus)
        if config.distance == "coordinates":
            return 1 - F.cosine_similarity(live, consensus, dim=1).mean()
        if config.row_normalize:
            live = F.normalize(live, dim=1)
        if config.distance == "relational-kl":
            live = live - live.mean(0) if config.center else live
            return relational_kl(live, consensus, config.temperature, config.consensus_temperature, rows)
        similarity = _similarity(live, consensus, config)
        return similarity if config.distance == "literal-cka" else 1 - similarity


def _similarity(live: Tensor, consensus: Tensor, config: AlignmentConfig) -> Tensor:
    debiased = config.estimator == "debiased"
    if config.kernel == "linear":
        return factor_cka(live, consensus, config.center, debiased)
    k, mean = gram(live, config), consensus @ consensus.T
    if config.center or debiased:
        k, mean = centre(k), centre(mean)
    return cka_debiased(k, mean) if debiased else cka(k, mean)


def relational_kl(
    live: Tensor,
    consensus: Tensor,
    temperature: float,
    consensus_temperature: float | None = None,
    rows: int | None = None,
) -> Tensor:
    """Return the mean KL divergence between an image's softmax over its similarities to all other images in the
    consensus and in `live`, over the first `rows` images (by default all).

    At a low `consensus_temperature` only the nearest neighbours of an image count. CKA is dominated by the few largest
    directions of a kernel, on which clients agree anyway; which images are neighbours is where their mean is better.
    """
    own = torch.eye(len(live), dtype=torch.bool, device=live.device)[:rows]
    units = [
        (F.normalize(consensus, dim=1), consensus_temperature or temperature),
        (F.normalize(live, dim=1), temperature),
    ]
    wanted, given = ((z[:rows] @ z.T / t).masked_fill(own, float("-inf")) for z, t in units)
    # The diagonal is -inf on both sides and would give 0 * nan: drop it.
    wanted, given = (m.log_softmax(1)[~own].view(len(own), -1) for m in (wanted, given))
    return F.kl_div(given, wanted, reduction="batchmean", log_target=True)

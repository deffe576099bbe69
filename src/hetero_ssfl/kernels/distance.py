"""The alignment term's distance between a client's kernel and the mean kernel, on some RAD rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import AlignmentConfig
from .cka import at_least_float32, centre, cka, cka_debiased, factor_cka, gram


def alignment_distance(
    live: Tensor, consensus: Tensor, config: AlignmentConfig, rows: int | None = None, anchors: Tensor | None = None
) -> Tensor:
    """Return distance(K_k, K_mean) on some RAD rows: `live` (n x d) with gradient, `consensus` (n x r) rows of B.

    If only the first `rows` have a gradient, the neighbourhoods of the others are not compared: they would only lower
    the weight of the first. With `coordinates`, both are vectors in the space of the coordinates, and `anchors` are the
    coordinates of all RAD images, by default those of these rows.
    """
    with torch.autocast(live.device.type, enabled=False):
        live, consensus = at_least_float32(live), at_least_float32(consensus)
        if config.distance == "coordinates":
            return coordinate_distance(live, consensus, consensus if anchors is None else anchors, config.temperature)
        if config.row_normalize:
            live = F.normalize(live, dim=1)
        if config.distance == "relational-kl":
            live = live - live.mean(0) if config.center else live
            return relational_kl(live, consensus, config.temperature, config.consensus_temperature, rows)
        debiased = config.estimator == "debiased"
        if config.kernel == "linear":
            similarity = factor_cka(live, consensus, config.center, debiased)
        else:
            k, mean = gram(live, config), consensus @ consensus.T
            if config.center or debiased:
                k, mean = centre(k), centre(mean)
            similarity = cka_debiased(k, mean) if debiased else cka(k, mean)
        return similarity if config.distance == "literal-cka" else 1 - similarity


def coordinate_distance(predicted: Tensor, wanted: Tensor, anchors: Tensor, temperature: float) -> Tensor:
    """Return the mean KL divergence between two softmaxes over an image's similarities to the anchors: where the image
    lies among the RAD images by its coordinates, and by what a client's head predicts from a view of it."""
    units = F.normalize(anchors, dim=1).T / temperature
    there, here = ((F.normalize(z, dim=1) @ units).log_softmax(1) for z in (wanted, predicted))
    return F.kl_div(here, there, reduction="batchmean", log_target=True)


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

    def log_neighbourhoods(z: Tensor, temperature: float) -> Tensor:
        z = F.normalize(z, dim=1)
        similarity = (z[:rows] @ z.T / temperature).masked_fill(own, float("-inf"))
        # The diagonal is -inf on both sides and would give 0 * nan: drop it.
        return similarity.log_softmax(1)[~own].view(len(own), -1)

    wanted = log_neighbourhoods(consensus, consensus_temperature or temperature)
    return F.kl_div(log_neighbourhoods(live, temperature), wanted, reduction="batchmean", log_target=True)

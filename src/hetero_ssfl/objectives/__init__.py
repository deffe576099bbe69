"""The two terms of a client's loss as pure functions: the local loss, by name, and the alignment."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ..errors import ConfigError
from ..kernels.cka import centre, cka, cka_debiased, factor_cka, factor_hsic_debiased, gram
from ..kernels.distance import alignment_distance
from ..models import Learner
from ..plugins import find
from .embeddings import barlow_twins, on_pairs, simclr, vicreg
from .siamese import byol, feature_spread, regression_loss, simsiam

LocalLoss = Callable[[Learner, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""Returns the loss of a batch from the networks and views, and the first view's projections to monitor for collapse."""

LOCAL_LOSSES: dict[str, LocalLoss] = {
    "byol": byol,
    "simsiam": simsiam,
    "vicreg": on_pairs(vicreg),
    "simclr": on_pairs(simclr),
    "barlow-twins": on_pairs(barlow_twins),
}


def local_loss(learner: Learner, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute the self-supervised loss `ssl.kind`: a built-in one or the user's own."""
    kind = learner.ssl.kind
    if kind in LOCAL_LOSSES:
        return LOCAL_LOSSES[kind](learner, views)
    made = find(kind, "ssl.kind")(learner, views)
    loss, z = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(loss, Tensor) or loss.ndim or not isinstance(z, Tensor) or z.ndim != 2:
        got = ", ".join(str(tuple(m.shape)) if isinstance(m, Tensor) else type(m).__name__ for m in (loss, z))
        raise ConfigError(
            f"ssl.kind = '{kind}' returned {got}, expected a loss of shape () and projections of shape (n, width). "
            "Return both: loss, z."
        )
    return loss, z


__all__ = [
    "LOCAL_LOSSES",
    "LocalLoss",
    "alignment_distance",
    "barlow_twins",
    "byol",
    "centre",
    "cka",
    "cka_debiased",
    "factor_cka",
    "factor_hsic_debiased",
    "feature_spread",
    "gram",
    "local_loss",
    "regression_loss",
    "simclr",
    "simsiam",
    "vicreg",
]

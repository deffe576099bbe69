"""The local self-supervised losses: one file each, found by the name in `ssl.kind`.

To add one, write `NAME.py` beside the others and add it to LOCAL_LOSSES.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from ...errors import ConfigError
from ...plugins import find
from ..learner import Learner
from .barlow_twins import barlow_twins
from .byol import byol
from .pairs import on_pairs
from .simclr import simclr
from .simsiam import simsiam
from .vicreg import vicreg

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

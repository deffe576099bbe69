"""The plots that a notebook shows of a run."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ..report.plots import heat_map, subplots
from ..runs.events import ClientTrained


def draw_losses(axes: Axes, clients: Sequence[str], trained: Sequence[ClientTrained]) -> None:
    for name in clients:
        own = {e.round: e.figures["loss_ssl"] for e in trained if e.client == name and "loss_ssl" in e.figures}
        axes.plot([*own], [*own.values()], marker="o", markersize=3, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set(xlabel="round", ylabel="self-supervised loss")
    axes.legend(frameon=False, fontsize=7)


def losses_and_cka(
    clients: Sequence[str], trained: Sequence[ClientTrained], mean_cka: Mapping[str, float], mutual: Tensor | None
) -> str:
    """Return a plot of losses and, if the encoders exist, of their mutual CKA as an inline image."""
    figure, (left, right) = subplots(1, 2, figsize=(9, 3.2))
    draw_losses(left, clients, trained)
    alt = "self-supervised loss of each client over the rounds"
    if mutual is None:
        right.set_axis_off()
    else:
        heat_map(right, mutual, "mutual CKA on the RAD", list(mean_cka))
        means = ", ".join(f"{name} {value:.2f}" for name, value in mean_cka.items())
        alt += f"; mutual CKA of the clients, {means} on average"
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'

"""Plots of runs. Each function draws on the axes it is given, so that plots can be combined freely."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import ConfigError
from ..learning.floors import FULL_WIDTH
from ..runs.events import Evaluated, Event, FloorProbed
from ..runs.files import write_atomically

BLUE, ORANGE, GREY = "#2a6f97", "#d1602a", "#8a8a8a"


def subplots(*shape: int, figsize: tuple[float, float]) -> tuple[Figure, Any]:
    """Create a figure without pyplot, so that the user's backend is not changed."""
    with rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=figsize)
        return figure, figure.subplots(*shape)


def curves(axes: Axes, runs: Mapping[str, Sequence[Event]], metric: str) -> None:
    """Plot validation accuracy over rounds: mean over clients, and a band from the lowest to the highest client."""
    for (label, events), colour in zip(runs.items(), (GREY, ORANGE, BLUE, "#4f772d"), strict=False):
        seen = [e for e in events if isinstance(e, Evaluated) and e.split == "validation"]
        rounds = [e.round for e in seen]
        values = [[s[metric] for s in e.clients.values() if metric in s] for e in seen]
        if not any(values):
            continue
        axes.plot(rounds, [np.mean(v) for v in values], color=colour, marker="o", markersize=3, label=label)
        axes.fill_between(rounds, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.12, lw=0)
    floors = [e for events in runs.values() for e in events if isinstance(e, FloorProbed) and e.split == "validation"]
    for name, value in {e.name: e.mean[metric] for e in floors if metric in e.mean}.items():
        floor(axes, name, value)
    axes.set(xlabel="round", ylabel=f"validation accuracy (%)\n{metric.replace('_', ', ')}")
    axes.legend(frameon=False)


def floor(axes: Axes, name: str, value: float) -> None:
    """Draw what features reach that nobody trained."""
    axes.axhline(value, color="black", linewidth=0.8, linestyle=":" if name.endswith(FULL_WIDTH) else "--")
    axes.annotate(name, (0, value), (2, 2), textcoords="offset points", fontsize=7)


def heat_map(axes: Axes, matrix: Any, title: str, labels: Sequence[str]) -> None:
    """Plot the mutual CKA of the clients with a number in each cell."""
    matrix = np.asarray(matrix)
    axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
    for i, j in np.ndindex(*matrix.shape):
        axes.text(
            j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", fontsize=7, color="w" if matrix[i, j] < 0.6 else "k"
        )
    off = matrix[~np.eye(len(matrix), dtype=bool)]
    axes.set_title(f"{title}\nmean {off.mean():.2f}" if len(off) else title, fontsize=9)
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)


def holdings(axes: Axes, counts: Mapping[str, Sequence[int]], classes: Sequence[str]) -> None:
    """Plot how many images of each class each client has; the area of a circle is the number of images."""
    table = np.array(list(counts.values()))
    clients, labels = np.nonzero(table)
    largest = max(1, table.max())
    side = min(20.0, 260.0 / max(table.shape))
    axes.scatter(labels, clients, s=(table[clients, labels] / largest) * side**2, color=BLUE, alpha=0.8, lw=0)
    axes.set(xlabel="class", ylabel="client", xlim=(-0.7, table.shape[1] - 0.3), ylim=(len(table) - 0.3, -0.7))
    if len(classes) <= 20:
        axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right", fontsize=8)
    if len(table) <= 20:
        axes.set_yticks(range(len(table)), list(counts), fontsize=8)
    axes.set_title(f"images of each class (largest circle: {largest})", fontsize=9)


def comparison(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plot runs side by side: a bar for the mean, a dot for each seed."""
    for position, row in enumerate(rows):
        axes.barh(position, row["mean"] or 0, color=BLUE if position else GREY, height=0.6, alpha=0.8)
        axes.plot(list(row["per_seed"].values()), [position] * len(row["per_seed"]), "k.", markersize=5)
    axes.set_yticks(range(len(rows)), [row["run"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"test accuracy (%), {rows[0]['metric'].replace('_', ', ')}")


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically. The same figure gives the same .svg file, without date and random names."""
    buffer, kind = io.BytesIO(), path.suffix.lstrip(".") or "png"
    try:
        with rc_context({"svg.hashsalt": "hetero-ssfl"}):
            figure.savefig(
                buffer, format=kind, dpi=150, bbox_inches="tight", metadata={"Date": None} if kind == "svg" else None
            )
    except ValueError as error:
        raise ConfigError(
            f"cannot save a plot to '{path}': {error}. Use a name that ends in .png, .svg or .pdf."
        ) from None
    write_atomically(path, buffer.getvalue())


def draw_holdings(counts: Mapping[str, Sequence[int]], classes: Sequence[str], path: Path) -> None:
    figure, axes = subplots(figsize=(7, 4.5))
    holdings(axes, counts, classes)
    save(figure, path)

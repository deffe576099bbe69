"""What the measured theorem says: its figures for JSON and tables, and sentences about the bound."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measure import ClientFigures, MeasuredRound

FILE = "theory.json"  # in a run folder; written by `hetero-ssfl theory`, read by `hetero-ssfl report`

CONSTANTS, LIMITS = ("l1", "l2", "p", "r", "sigma"), ("largest_eta", "largest_mu")
KEYS = ("change", "bound", "ratio", *CONSTANTS, *LIMITS)  # behind the client's name in a row
SHARED = ("l2", "p", "r")  # every client moves the mean kernel: a bound has the largest of all clients
HEAD = (
    *("client", "measured change", "bound", "bound / |change|", "L1", "L2", "P", "R", "sigma"),
    *("largest eta", "largest mu"),
)


def rows(clients: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return one row per client under HEAD, from its figures as `as_content` gives them.

    Below several clients stand the largest L2, P and R, which are part of every client's bound.
    """
    found = [_row(client, figures) for client, figures in clients.items()]
    if len(clients) > 1:
        largest = {key: max(figures["constants"][key] for figures in clients.values()) for key in SHARED}
        found.append(["largest", *(f"{largest[key]:.3g}" if key in SHARED else "" for key in KEYS)])
    return found


def _row(client: str, figures: Mapping[str, Any]) -> list[str]:
    constants = figures["constants"]
    ratio = "-" if figures["ratio"] is None else f"{figures['ratio']:.2g}"
    return [
        client,
        f"{figures['change']:+.3g}",
        f"{figures['bound']['total']:+.3g}",
        ratio,
        *(f"{constants[key]:.3g}" for key in CONSTANTS),
        *(_limit(figures[key]) for key in LIMITS),
    ]


def _limit(value: float | None) -> str:
    return "any" if value is None or math.isinf(value) else "none" if value == 0 else f"{value:.2g}"


def as_content(measured: "MeasuredRound") -> dict[str, Any]:
    """Return a round for JSON. A limit of 0 means that no value is allowed, null that every value is."""
    clients = {name: _figures(figures) for name, figures in measured.clients.items()}
    return {"start": measured.start, "round": measured.round, "clients": clients}


def _figures(f: "ClientFigures") -> dict[str, Any]:
    limits = ("largest_eta", "largest_eta_without_alignment", "largest_mu")
    return {
        **{key: getattr(f, key) for key in ("before", "after_steps", "after_round", "change", "local_change", "ratio")},
        "eta": f.eta,
        "mu": f.mu,
        "constants": vars(f.constants),
        "bound": {**vars(f.bound), "local": f.bound.local, "total": f.bound.total},
        "bound_for_every_step": f.bound_for_every_step,
        **{key: None if math.isinf(getattr(f, key)) else getattr(f, key) for key in limits},
    }


# --- sentences ---


def findings(measured: "Sequence[MeasuredRound]") -> list[str]:
    """Return what the figures say about the bound."""
    figures = [f for each in measured for f in each.clients.values()]
    count = len(figures)
    below = sum(f.change <= f.bound.total for f in figures)
    sentences = [f"The measured change is below the bound in {below} of {count} measured rounds."]
    ratios = [f.ratio for f in figures if f.ratio is not None]
    if ratios:
        sentences.append(
            f"The bound is {median(ratios):.2g} times the size of the measured change (median; {min(ratios):.2g} to "
            f"{max(ratios):.2g}). A ratio far above 1 means that the bound does not limit the loss in "
            "practice."
        )
    sentences += [_about_lemma_1(figures), _about_the_kernel_term(figures), _about_eta(figures), _about_mu(figures)]
    sentences.append(
        "The constants are the largest values along the measured steps. Over all weights they are larger, so the true "
        "bound is looser."
    )
    return [sentence for sentence in sentences if sentence]


def _about_lemma_1(figures: "Sequence[ClientFigures]") -> str:
    held = sum(f.local_change <= f.bound.local for f in figures)
    promised = sum(f.bound.local < 0 for f in figures)
    return (
        f"Local steps alone (Lemma 1): the bound promises a decrease in {promised} of {len(figures)} rounds and holds "
        f"in {held}; the median bound is {median(f.bound.local for f in figures):+.2g}, the median measured change "
        f"{median(f.local_change for f in figures):+.2g}."
    )


def _about_the_kernel_term(figures: "Sequence[ClientFigures]") -> str:
    aligned = [f for f in figures if f.bound.kernel > 0]
    if not aligned:
        return "mu is 0, so the new mean kernel does not change the loss."
    shifts = [abs(f.after_round - f.after_steps) for f in aligned]
    return (
        f"New mean kernel (Lemma 2): the loss may change by {median(f.bound.kernel for f in aligned):.2g} (median) and "
        f"changed by at most {max(shifts):.2g}. The proof of this term counts one gradient step; a round has E, and "
        f"with the factor E the median bound is {median(f.bound_for_every_step for f in aligned):.2g}."
    )


def _about_eta(figures: "Sequence[ClientFigures]") -> str:
    used, none = max(f.eta for f in figures), sum(f.largest_eta == 0 for f in figures)
    alone = [f.largest_eta_without_alignment for f in figures]
    words = f"eta: the run uses up to {used:.2g}. With the run's mu the theorem "
    if none == len(figures):
        words += "allows no positive eta"
    else:
        words += f"allows no positive eta in {none} of {len(figures)} rounds"
    return f"{words}; without the kernel term it allows {_limit(min(alone))} to {_limit(max(alone))}."


def _about_mu(figures: "Sequence[ClientFigures]") -> str:
    allowed, used = min(f.largest_mu for f in figures), max(f.mu for f in figures)
    words = f"mu: the run uses {used:g}. The largest mu that the theorem allows for every client is {_limit(allowed)}"
    return f"{words}, {used / allowed:.2g} times less." if 0 < allowed < used else f"{words}."

"""The measured theorem as JSON, and as a section of a report."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...runs.schema import StudySection, StudyTable

if TYPE_CHECKING:
    from .measure import ClientFigures, MeasuredRound

CONSTANTS, LIMITS = ("l1", "l2", "p", "r", "sigma"), ("largest_eta", "largest_mu")
KEYS = ("change", "bound", "ratio", *CONSTANTS, *LIMITS)  # behind the client's name in a row
SHARED = ("l2", "p", "r")  # every client moves the mean kernel: a bound has the largest of all clients
HEAD = [
    *("client", "measured change", "bound", "bound / |change|", "L1", "L2", "P", "R", "sigma"),
    *("largest eta", "largest mu"),
]


def section(rounds: Sequence[Mapping[str, Any]], changed_assumptions: Sequence[str]) -> StudySection:
    return StudySection(
        title="The convergence bound",
        intro="The paper bounds the change of a client's loss in one round. Beside it stands the change that was "
        "measured over a few steps. The constants are the largest values along these steps; over all weights they are "
        "larger, and so is the bound. docs/theory.md explains them.",
        tables=[StudyTable(caption=_caption(each), head=HEAD, rows=rows(each["clients"])) for each in rounds],
        folded={"Where the run differs from the theorem": list(changed_assumptions)},
    )


def _caption(measured: Mapping[str, Any]) -> str:
    everyone = list(measured["clients"].values())
    fewest, most = (choose(client["constants"]["steps"] for client in everyone) for choose in (min, max))
    return (
        f"round {measured['round']} from the {measured['start']}: "
        f"E = {fewest if fewest == most else f'{fewest} to {most}'} steps, "
        f"eta = {max(client['eta'] for client in everyone):.3g}, mu = {max(client['mu'] for client in everyone):g}, "
        f"L = {everyone[0]['constants']['rows']}"
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

"""The measured theorem as a section of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...runs.schema import StudySection, StudyTable

CONSTANTS, LIMITS = ("l1", "l2", "p", "r", "sigma"), ("largest_eta", "largest_mu")
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
    steps = sorted({client["constants"]["steps"] for client in everyone})
    return (
        f"round {measured['round']} from the {measured['start']}: "
        f"E = {' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} steps, "
        f"eta = {max(client['eta'] for client in everyone):.3g}, mu = {max(client['mu'] for client in everyone):g}, "
        f"L = {everyone[0]['constants']['rows']}"
    )


def rows(clients: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return one row per client under HEAD. Below several clients stand the largest L2, P and R."""
    table = [_row(name, client) for name, client in clients.items()]
    if len(clients) > 1:
        largest = {key: max(client["constants"][key] for client in clients.values()) for key in SHARED}
        constants = [f"{largest[key]:.3g}" if key in SHARED else "" for key in CONSTANTS]
        table.append(["largest", "", "", "", *constants, "", ""])
    return table


def _row(name: str, client: Mapping[str, Any]) -> list[str]:
    return [
        name,
        f"{client['change']:+.3g}",
        f"{client['bound']['total']:+.3g}",
        "-" if client["ratio"] is None else f"{client['ratio']:.2g}",
        *(f"{client['constants'][key]:.3g}" for key in CONSTANTS),
        *(_limit(client[key]) for key in LIMITS),
    ]


def _limit(value: float | None) -> str:
    return "any" if value is None else "none" if value == 0 else f"{value:.2g}"

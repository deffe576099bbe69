"""The results of an audit as a section of a report."""

from collections.abc import Mapping
from typing import Any

from ...runs.schema import StudyPlot, StudySection, StudyTable
from .scene import OWN, UNTRAINED

HEAD = ["what the attacker has", "classes guessed", "members found", "AUC", "CKA", "probe"]
CLIENT_HEAD = ["client", "holds", "guessed", "AUC", "CKA", "probe", "own probe", "untrained probe"]
EXPLAINED = (
    "classes guessed: fraction of the guessed classes that the client holds. members found: fraction of the members "
    "among candidate images that are found with 1 % false positives. AUC: probability that a member scores higher than "
    "a non-member. CKA, probe: the stolen encoder's similarity to the client's on test images, and its linear probe."
)
PLOTS = (
    ("Classes guessed right (%)", "class_hits", 100),
    ("Members found at 1 % false positives (%)", "members_found", 100),
    ("CKA of the stolen encoder", "cka", 1),
    ("Linear probe of the stolen encoder (%)", "probe", 1),
)


def section(content: Mapping[str, Any]) -> StudySection:
    caption = f"round {content['round']}, {content['form']} form: all clients"
    return StudySection(
        title="What the server could learn",
        intro="Attacks on the clients from what their server has: as sent, and as it would have with sketches, secure "
        "sums or noise. They are single attacks, not bounds. docs/privacy.md explains them.",
        tables=[
            StudyTable(caption=caption, head=HEAD, rows=rows(content)),
            StudyTable(caption="each client, as sent", head=CLIENT_HEAD, rows=client_rows(content, "as sent")),
        ],
        plots=[_plot(content, *plot) for plot in PLOTS],
        notes=[EXPLAINED],
        folded={"What the attacker knows": content["attacker"]},
    )


def _plot(content: Mapping[str, Any], title: str, key: str, scale: float) -> StudyPlot:
    """Return one metric of every view, and what 95 % of random guesses stay below."""
    values = {str(row["view"]): scale * row[key] for row in content["views"] if row[key] is not None}
    limit = content["chance"].get(f"{key}_95")
    return StudyPlot(title=title, values=values, limit=None if limit is None else scale * limit)


def rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows under HEAD: each view, and chance."""
    chance = content["chance"]
    pairs = [(chance[key], chance[f"{key}_95"]) for key in ("class_hits", "members_found")]
    limits = ["-" if mean is None else f"{_percent(mean)} ({_percent(limit)})" for mean, limit in pairs]
    views = [[str(row["view"]), _percent(row["class_hits"]), *_metrics(row)] for row in content["views"]]
    return [*views, ["chance (95 % of guesses below)", *limits, f"{chance['auc']:.2f}", "", ""]]


def client_rows(content: Mapping[str, Any], view: str) -> list[list[str]]:
    return [
        [
            name,
            ", ".join(client["holds"]),
            ", ".join(client["views"][view]["guessed"]) or "-",
            *_metrics(client["views"][view])[1:],
            f"{client[OWN]['probe']:.1f}",
            f"{client[UNTRAINED]['probe']:.1f}",
        ]
        for name, client in content["clients"].items()
    ]


def _metrics(row: Mapping[str, Any]) -> list[str]:
    return [_percent(row["members_found"]), f"{row['auc']:.2f}", f"{row['cka']:.2f}", f"{row['probe']:.1f}"]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"

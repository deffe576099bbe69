"""The results of an audit as JSON, and as a section of a report."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...runs.schema import StudyPlot, StudySection, StudyTable

if TYPE_CHECKING:
    from .measure import Audit, ClientAudit, Compared

HEAD = ["what the attacker has", "classes guessed", "members found", "AUC", "CKA", "probe"]
CLIENT_HEAD = ["client", "holds", "guessed", "AUC", "CKA", "probe", "own probe", "untrained probe"]
OWN, UNTRAINED = "the client's own encoder", "its initial weights only"
EXPLAINED = (
    "classes guessed: fraction of the guessed classes that the client holds. members found: fraction of the members "
    "among candidate images that are found with 1 % false positives. AUC: probability that a member scores higher than "
    "a non-member. CKA, probe: the stolen encoder's similarity to the client's on test images, and its linear probe."
)


# --- figures ---


def as_content(audit: "Audit") -> dict[str, Any]:
    """Return the figures for JSON. Every row is over all clients."""
    everyone = list(audit.clients.values())
    rows = [
        {"view": OWN, **_over_clients([c.own for c in everyone]), "class_hits": None},
        {"view": UNTRAINED, **_over_clients([c.untrained for c in everyone]), "class_hits": None},
        *(
            {"view": view, **_over_clients([c.stolen[view] for c in everyone]), "class_hits": audit.hit_rate(view)}
            for view in audit.views
        ),
    ]
    chance, limit = audit.class_chance or (None, None)
    return {
        "round": audit.round,
        "form": audit.form,
        "views": rows,
        "chance": {
            "class_hits": chance,
            "class_hits_95": limit,
            "members_found": 0.01,
            "members_found_95": audit.member_chance,
            "auc": 0.5,
        },
        "candidates": {
            "members": sum(len(c.own.members) for c in everyone),
            "others": sum(len(c.own.others) for c in everyone),
        },
        "clients": {name: _client(client, audit) for name, client in audit.clients.items()},
    }


def _over_clients(found: "Sequence[Compared]") -> dict[str, float]:
    from .measure import pooled

    rate, area = pooled(found)
    return {
        "members_found": rate,
        "auc": area,
        "cka": fmean(each.cka for each in found),
        "probe": fmean(each.probe for each in found),
    }


def _client(client: "ClientAudit", audit: "Audit") -> dict[str, Any]:
    def named(labels: Sequence[int]) -> list[str]:
        return [audit.classes[label] for label in labels]

    return {
        "holds": named(client.held),
        OWN: _over_clients([client.own]),
        UNTRAINED: _over_clients([client.untrained]),
        "views": {
            view: {**_over_clients([client.stolen[view]]), "guessed": named(client.guessed.get(view, ()))}
            for view in audit.views
        },
    }


# --- the section of a report ---

PLOTS = (
    ("Classes guessed right (%)", "class_hits", 100),
    ("Members found at 1 % false positives (%)", "members_found", 100),
    ("CKA of the stolen encoder", "cka", 1),
    ("Linear probe of the stolen encoder (%)", "probe", 1),
)


def section(content: Mapping[str, Any]) -> StudySection:
    tables = [
        StudyTable(
            caption=f"round {content['round']}, {content['form']} form: all clients", head=HEAD, rows=rows(content)
        ),
        StudyTable(caption="each client, as sent", head=CLIENT_HEAD, rows=client_rows(content, "as sent")),
    ]
    return StudySection(
        title="What the server could learn",
        intro="Attacks on the clients from what their server has: as sent, and as it would have with sketches, secure "
        "sums or noise. They are single attacks, not bounds. docs/privacy.md explains them.",
        tables=tables,
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
    last = [
        "chance (95 % of guesses below)",
        _with_limit(chance["class_hits"], chance["class_hits_95"]),
        _with_limit(chance["members_found"], chance["members_found_95"]),
        f"{chance['auc']:.2f}",
        "",
        "",
    ]
    return [[str(row["view"]), _percent(row["class_hits"]), *_figures(row)] for row in content["views"]] + [last]


def client_rows(content: Mapping[str, Any], view: str) -> list[list[str]]:
    """Return the rows under CLIENT_HEAD for one view."""
    return [
        [
            name,
            ", ".join(client["holds"]),
            ", ".join(client["views"][view]["guessed"]) or "-",
            *_figures(client["views"][view])[1:],
            f"{client[OWN]['probe']:.1f}",
            f"{client[UNTRAINED]['probe']:.1f}",
        ]
        for name, client in content["clients"].items()
    ]


def _figures(row: Mapping[str, Any]) -> list[str]:
    return [_percent(row["members_found"]), f"{row['auc']:.2f}", f"{row['cka']:.2f}", f"{row['probe']:.1f}"]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _with_limit(value: float | None, limit: float | None) -> str:
    return "-" if value is None else f"{_percent(value)} ({_percent(limit)})"

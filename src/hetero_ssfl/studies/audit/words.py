"""What an audit found: its figures for JSON and tables, and sentences about them."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measure import Audit, ClientAudit, Compared

FILE = "audit.json"  # in a run folder; written by `hetero-ssfl audit`, read by `hetero-ssfl report`

HEAD = ("what the attacker has", "classes guessed", "members found", "AUC", "CKA", "probe")
CLIENT_HEAD = ("client", "holds", "guessed", "AUC", "CKA", "probe", "own probe", "untrained probe")
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


# --- tables ---


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


# --- sentences ---


def findings(content: Mapping[str, Any]) -> list[str]:
    """Return what the figures say."""
    by_view = {row["view"]: row for row in content["views"]}
    return [
        *_about_classes(content),
        _about_members(content),
        _about_stealing(by_view),
        f"Candidates: {content['candidates']['members']} members and {content['candidates']['others']} non-members, "
        "over all clients. Few non-members make the true-positive rate at 1 % coarse.",
        "These are single attacks, not bounds: a better attack may find more, and 'not found' does not mean 'hidden'.",
    ]


def _about_classes(content: Mapping[str, Any]) -> list[str]:
    chance, limit = content["chance"]["class_hits"], content["chance"]["class_hits_95"]
    if chance is None:
        return ["Class mix: nothing to guess, because all clients hold all classes or the RAD has other classes."]
    guessed = [row for row in content["views"] if row["class_hits"] is not None]
    sent = guessed[0]["class_hits"]
    above = [row["view"] for row in guessed if row["class_hits"] > limit]
    return [
        f"Class mix: from the contributions as sent, {_percent(sent)} of the guessed classes are right; random guesses "
        f"reach {_percent(chance)}, and 95 % of them at most {_percent(limit)}. "
        + (f"Above that range: {', '.join(above)}." if above else "No view is above that range.")
    ]


def _about_members(content: Mapping[str, Any]) -> str:
    limit = content["chance"]["members_found_95"]
    above = [row["view"] for row in content["views"] if row["members_found"] > limit]
    own, _, sent = content["views"][:3]
    return (
        f"Membership: at 1 % false positives, {_percent(sent['members_found'])} of the members are found from the "
        f"contributions as sent, and {_percent(own['members_found'])} with the clients' own encoders. Scores without "
        f"information find up to {_percent(limit)} in 95 % of cases. "
        + (f"Above that: {', '.join(above)}." if above else "Nothing is above that.")
    )


def _about_stealing(by_view: Mapping[str, Mapping[str, Any]]) -> str:
    own, untrained, sent = (by_view[name] for name in (OWN, UNTRAINED, "as sent"))
    return (
        f"Stealing: an encoder trained on the kernels as sent has a CKA of {sent['cka']:.2f} with the client's on test "
        f"images, and its initial weights {untrained['cka']:.2f}. Its linear probe reaches {sent['probe']:.1f} %; the "
        f"client's own {own['probe']:.1f} %, its initial weights {untrained['probe']:.1f} %."
    )

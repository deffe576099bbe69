"""The sections for which the encoders themselves are asked: how alike they look at the RAD, neighbours, maps.

Encoders of participants on other machines are not here: those sections then say so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from torch import Tensor

from ..errors import HeteroSSFLError
from . import svg
from .arms import Arm, is_number, without_folders
from .blocks import WORDS, Block, Figure, Figures, Folded, Rows, Section, Text, Tiles
from .looks import Look, Map, are_pictures, look, mean_off_diagonal, plane, rad_of, shown_rows, thumbnail
from .phrases import UNTRAINED, legend, names_of

NEIGHBOURS = 5
QUERIES = 4
ON_A_MAP = 150
MOST_SHOWN = 8  # clients whose neighbours and maps are shown


@dataclass(frozen=True)
class View:
    """A run's clients as they look at the RAD: before training, or after."""

    label: str
    style: str
    arm: Arm
    look: Look

    def name(self, client: str) -> str:
        return self.arm.name(client)


@dataclass(frozen=True)
class Gallery:
    sections: list[Section]
    pictures: dict[str, str]
    """The RAD images that the sections use: id and data address."""


def read_views(arms: Sequence[Arm]) -> tuple[list[View], list[str]]:
    """Untrained, then each run after training; and why some are missing."""
    last, views, reasons = arms[-1], [], []
    wanted = [("untrained", UNTRAINED, last, False)]
    wanted += [(name, arm.style, arm, True) for arm, name in zip(arms, names_of(arms), strict=True)]
    for label, style, arm, trained in wanted:
        try:
            views.append(View(label, style, arm, look(arm.folder, trained)))
        except (HeteroSSFLError, RuntimeError) as error:  # RuntimeError: weights of a model that has changed since
            if trained:
                reasons.append(without_folders(f"{arm.label}: its encoders cannot be asked here. {error}"))
    return views, reasons


def gallery(arms: Sequence[Arm], kind: Map) -> Gallery:
    views, reasons = read_views(arms)
    pictures = _Pictures(arms[-1])
    digest = arms[-1].result.facts.get("rad_digest")
    same_rad = [view for view in views if view.arm.result.facts.get("rad_digest") == digest]
    sections = [
        _likeness(arms, views, reasons),
        _spectrum(arms, views, reasons),
        _neighbours(same_rad, pictures, reasons),
        _maps(same_rad, pictures, kind, reasons),
    ]
    return Gallery(sections, pictures.used)


def before_and_after(views: Sequence[View]) -> Sequence[View]:
    """The two that show most beside each other: the first run and the last, or untrained and trained."""
    trained = [view for view in views if view.style != UNTRAINED]
    return [trained[0], trained[-1]] if len(trained) > 1 else views


class _Pictures:
    """Each RAD image once in the page, whoever shows it."""

    def __init__(self, arm: Arm) -> None:
        self.used: dict[str, str] = {}
        try:
            rad = rad_of(arm.folder)
        except HeteroSSFLError:
            self.rad: Tensor | None = None
            return
        self.rad = rad[shown_rows(len(rad))] if are_pictures(rad) else None

    def __bool__(self) -> bool:
        return self.rad is not None

    def id_of(self, row: int) -> str:
        assert self.rad is not None
        name = f"rad{row}"
        if name not in self.used:
            self.used[name] = thumbnail(self.rad[row])
        return name


# --- mutual CKA ------------------------------------------------------------------------------------


def _likeness(arms: Sequence[Arm], views: Sequence[View], reasons: Sequence[str]) -> Section:
    title = f"How alike the clients see the shared {arms[-1].things}"
    blocks: list[Block] = []
    if views:
        figures = [_heat(v.look.mutual_cka, [v.name(n) for n in v.look.names], v.label) for v in views]
        blocks.append(Figures(figures, "small"))
    for arm in arms:
        rounds = [event for event in arm.of("kernels") if _is_matrix(event)]
        if not rounds:
            continue
        most = 7 if len(rounds[-1]["clients"]) <= 12 else 3  # with the curve, one or two rows of four
        figures = [
            _heat(event["mutual_cka"], [arm.name(str(n)) for n in event["clients"]], f"round {event['round']}")
            for event in (rounds[k] for k in shown_rows(len(rounds), most))
        ]
        means = [(event["round"], mean_off_diagonal(event["mutual_cka"])) for event in rounds]
        line = [(r, value, f"{arm.label}, round {r}: {value:.3f}") for r, value in means if value is not None]
        label = f"Mean mutual CKA of the clients over the rounds, {arm.label}"
        curve = Figure("mean over pairs", svg.line_chart([svg.Line(arm.style, line)], "round", label, width=280))
        words = (
            f"Over the rounds, {arm.label}: from the kernels that the clients sent, weighted as the alignment has them"
        )
        blocks.append(Text(f"{words}{'; figures of plain features, above, differ' if views else ''}."))
        blocks.append(Figures([*figures, curve] if curve.drawing else figures, "small"))
    sentences = [*dict.fromkeys(view.look.limits for view in views if view.look.limits), *reasons]
    if not blocks:
        sentences.append("There is nothing to compare.")
    intro = (
        "Mutual CKA of two clients: 1 where both see the same likenesses among the shared "
        f"{arms[-1].things}, 0 where unrelated."
    )
    return Section("likeness", title, " ".join([intro, *map(_sentence, sentences)]), blocks)


def _heat(matrix: Sequence[Sequence[float]], names: Sequence[str], title: str) -> Figure:
    average = mean_off_diagonal(matrix)
    note = "" if average is None else f"mean over pairs {average:.2f}"
    architecture = [name.partition(" ")[2] or name for name in names]
    drawing = svg.heat_map(matrix, architecture, f"Mutual CKA of {len(names)} clients, {title}. {note}")
    return Figure(title, drawing, note)


def _is_matrix(event: dict[str, Any]) -> bool:
    rows, size = event.get("mutual_cka") or [], len(event.get("clients", []))
    return size > 0 and len(rows) == size and all(len(row) == size and all(map(is_number, row)) for row in rows)


# --- the spectrum ----------------------------------------------------------------------------------


def _spectrum(arms: Sequence[Arm], views: Sequence[View], reasons: Sequence[str]) -> Section:
    title = "Spectrum of the mean kernel"
    figures = []
    lines = [_shares(view.style, view.label, view.look.spectrum()) for view in views]
    if lines:
        drawing = svg.line_chart(lines, "direction", "Share of each direction of the mean kernel", log=True)
        figures.append(Figure("from the encoders' features", drawing))
    for arm in arms:
        rounds = [event for event in arm.of("kernels") if event.get("spectrum")]
        steps = [rounds[k] for k in shown_rows(len(rounds), 3)] if rounds else []
        lines = []
        for place, event in enumerate(steps):
            style = arm.style if place == len(steps) - 1 else f"{arm.style} faint{place}"
            lines.append(_shares(style, f"{arm.label}, round {event['round']}", event["spectrum"]))
        drawing = svg.line_chart(lines, "direction", f"Spectrum of the consensus, {arm.label}", log=True)
        if drawing:
            which = ", ".join(str(event["round"]) for event in steps)
            note = f"rounds {which}; the strongest line is the last"
            figures.append(Figure(f"consensus at the server, {arm.label}", drawing, note))
    if not figures:
        return Section("spectrum", title, " ".join(map(_sentence, reasons)) or "There is no kernel to look at.")
    intro = "Each direction's share, largest first: a steep fall means that the clients agree on few directions only."
    return Section("spectrum", title, intro, [*legend(arms, bool(views)), Figures(figures)])


def _shares(style: str, label: str, shares: Sequence[float]) -> svg.Line:
    marked = (1, 2, 4, 8, 16, 32, 64)
    kept = [(k, share) for k, share in enumerate(shares, 1) if is_number(share) and share > 1e-6]
    words = {k: f"{label}, direction {k}: {share:.2%}" for k, share in kept if k in marked}
    return svg.Line(style, [(k, share, words.get(k, "")) for k, share in kept])


# --- neighbours ------------------------------------------------------------------------------------


def _neighbours(views: Sequence[View], pictures: _Pictures, reasons: Sequence[str]) -> Section:
    title = "Nearest neighbours"
    views = before_and_after(views)
    if not views or not pictures:
        why = (
            "The shared samples are not images, so there is nothing to show."
            if views
            else " ".join(map(_sentence, reasons))
        )
        return Section("neighbours", title, why or "There are no encoders to ask.")
    count = len(views[0].look.features[0])
    found = [view.look.neighbours(NEIGHBOURS) for view in views]
    clients = views[-1].look.names[:MOST_SHOWN]
    blocks: list[Block] = []
    for query in shown_rows(count, QUERIES + 2)[1:-1]:
        rows: list[list[str | Markup]] = []
        for client in clients:
            row: list[str | Markup] = [views[-1].name(client)]
            for view, near in zip(views, found, strict=True):
                known = client in view.look.names
                row.append(
                    _strip(near[view.look.names.index(client)][query].tolist(), pictures, client) if known else "-"
                )
            rows.append(row)
        blocks.append(Rows(_query(query, pictures), ["client", *[view.label for view in views]], rows, WORDS))
    shared = [(view.label, view.look.shared_neighbours(NEIGHBOURS)) for view in views]
    figures = ", ".join(f"{label} {value:.1f}" for label, value in shared if value is not None)
    intro = (
        f"A few shared images, and the {NEIGHBOURS} nearest to each as each client's encoder sees them, nearest first."
    )
    if figures:
        intro += f" Two clients have in common, of the {NEIGHBOURS} and on average over all images: {figures}."
    intro += _first_shown(views[-1])
    return Section("neighbours", title, intro, [Tiles(blocks)])


def _first_shown(view: View) -> str:
    count = len(view.look.names)
    return f" Shown for the first {MOST_SHOWN} of {count} clients." if count > MOST_SHOWN else ""


def _query(row: int, pictures: _Pictures) -> Markup:
    picture = svg.picture(
        32, 32, f"image {row + 1}", svg.use(pictures.id_of(row), 0, 0, 32, f"image {row + 1}"), style="query"
    )
    return picture + Markup(" nearest to image {}").format(row + 1)


def _strip(rows: Sequence[int], pictures: _Pictures, client: str) -> Markup:
    parts = [svg.use(pictures.id_of(row), 1 + 26 * place, 1, 24, f"image {row + 1}") for place, row in enumerate(rows)]
    label = f"nearest for {client}: images {', '.join(str(row + 1) for row in rows)}"
    return svg.picture(26 * len(rows), 26, label, *parts, style="strip")


# --- maps ------------------------------------------------------------------------------------------


def _maps(views: Sequence[View], pictures: _Pictures, kind: Map, reasons: Sequence[str]) -> Section:
    if not views:
        return Section("map", "Map of the RAD", " ".join(map(_sentence, reasons)) or "There are no encoders to ask.")
    together = [
        _map(v.look.mean_kernel, f"mean of all clients, {v.label}", v, pictures, kind) for v in before_and_after(views)
    ]
    last = views[-1]
    things = last.arm.things
    title = f"Map of the shared {things}"
    single = [
        _map(kernel, last.name(client), last, pictures, kind)
        for client, kernel in list(zip(last.look.names, last.look.kernels, strict=True))[:MOST_SHOWN]
    ]
    intro = (
        f"{things.capitalize()} that lie close together look alike to the encoders. No axis has a meaning of its own."
    )
    count = len(last.look.features[0])
    if count > ON_A_MAP:
        intro += f" Of {count}, {ON_A_MAP} are drawn."
    return Section(
        "map",
        title,
        intro,
        [
            Figures(together, "large"),
            Folded(f"Client by client, {last.label}.{_first_shown(last)}", [Figures(single)]),
        ],
    )


def _map(kernel: Tensor, title: str, view: View, pictures: _Pictures, kind: Map) -> Figure:
    rows = shown_rows(len(kernel), ON_A_MAP)
    places, words = plane(kernel, kind)
    ids = [pictures.id_of(row) for row in rows] if pictures else []
    points = [(*places[row], f"{view.arm.things[:-1]} {row + 1}") for row in rows]
    label = f"Map of {len(rows)} shared {view.arm.things}, {title}; {words}"
    return Figure(title, svg.scatter(points, ids, view.style, label), words)


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."

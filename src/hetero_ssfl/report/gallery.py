"""The sections that need the encoders' features of the RAD: mutual CKA, spectrum, neighbours and maps.

If the encoders are on other machines, these sections say so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from torch import Tensor

from ..errors import HeteroSSFLError
from ..runs.events import KernelsSeen, is_number
from . import svg
from .blocks import WORDS, Block, Figure, Figures, Folded, Rows, Section, Text, Tiles
from .rad_features import (
    FeatureReader,
    Map,
    RadFeatures,
    are_pictures,
    mean_off_diagonal,
    plane,
    rad_of,
    shown_rows,
    thumbnail,
)
from .reported_run import ReportedRun, without_folders
from .wording import UNTRAINED, legend, names_of

NEIGHBOURS = 5
QUERIES = 4
ON_A_MAP = 150
MOST_SHOWN = 8  # clients whose neighbours and maps are shown


@dataclass(frozen=True)
class View:
    """The clients' features of the RAD, before or after training."""

    label: str
    style: str
    run: ReportedRun
    features: RadFeatures

    def name(self, client: str) -> str:
        return self.run.name(client)


@dataclass(frozen=True)
class Gallery:
    sections: list[Section]
    pictures: dict[str, str]
    """The RAD images that the sections use: data URLs by id."""


def read_views(runs: Sequence[ReportedRun], features: FeatureReader) -> tuple[list[View], list[str]]:
    """Return the untrained view, then each run's trained view, and the reasons for missing ones."""
    last, views, reasons = runs[-1], [], []
    wanted = [("untrained", UNTRAINED, last, False)]
    wanted += [(name, run.style, run, True) for run, name in zip(runs, names_of(runs), strict=True)]
    for label, style, run, trained in wanted:
        try:
            views.append(View(label, style, run, features(run.folder, trained)))
        except (HeteroSSFLError, RuntimeError) as error:  # RuntimeError: the model's code has changed since training
            if trained:
                reasons.append(without_folders(f"The encoders of {run.label} cannot be loaded here. {error}"))
    return views, reasons


def gallery(runs: Sequence[ReportedRun], features: FeatureReader, kind: Map) -> Gallery:
    views, reasons = read_views(runs, features)
    pictures = _Pictures(runs[-1])
    digest = runs[-1].result.facts.get("rad_digest")
    same_rad = [view for view in views if view.run.result.facts.get("rad_digest") == digest]
    sections = [
        _likeness(runs, views, reasons),
        _spectrum(runs, views, reasons),
        _neighbours(same_rad, pictures, reasons),
        _maps(same_rad, pictures, kind, reasons),
    ]
    return Gallery(sections, pictures.used)


def before_and_after(views: Sequence[View]) -> Sequence[View]:
    """Return the two views to compare: the first and the last run, or untrained and trained."""
    trained = [view for view in views if view.style != UNTRAINED]
    return [trained[0], trained[-1]] if len(trained) > 1 else views


class _Pictures:
    """Stores each RAD image only once in the page."""

    def __init__(self, run: ReportedRun) -> None:
        self.used: dict[str, str] = {}
        try:
            rad = rad_of(run.folder)
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


def _likeness(runs: Sequence[ReportedRun], views: Sequence[View], reasons: Sequence[str]) -> Section:
    title = f"Similarity of the clients on the shared {runs[-1].things}"
    blocks: list[Block] = []
    if views:
        figures = [_heat(v.features.mutual_cka, [v.name(n) for n in v.features.names], v.label) for v in views]
        blocks.append(Figures(figures, "small"))
    for run in runs:
        rounds = [
            (event.round, event.clients or [], event.mutual_cka or []) for event in run.kernels if _is_matrix(event)
        ]
        if not rounds:
            continue
        most = 7 if len(rounds[-1][1]) <= 12 else 3  # with the curve, one or two rows of four
        figures = [
            _heat(matrix, [run.name(str(n)) for n in clients], f"round {number}")
            for number, clients, matrix in (rounds[k] for k in shown_rows(len(rounds), most))
        ]
        means = [(number, mean_off_diagonal(matrix)) for number, _, matrix in rounds]
        line = [(r, value, f"{run.label}, round {r}: {value:.3f}") for r, value in means if value is not None]
        label = f"Mean mutual CKA of the clients over the rounds, {run.label}"
        curve = Figure("mean over pairs", svg.line_chart([svg.Line(run.style, line)], "round", label, width=280))
        words = f"Over the rounds, {run.label}: computed from the kernels that the clients sent for the alignment"
        blocks.append(Text(f"{words}{', so the values differ from those above' if views else ''}."))
        blocks.append(Figures([*figures, curve] if curve.drawing else figures, "small"))
    sentences = [*dict.fromkeys(view.features.limits for view in views if view.features.limits), *reasons]
    if not blocks:
        sentences.append("There is nothing to compare.")
    intro = (
        "Mutual CKA of two clients: 1 if both find the same similarities among the shared "
        f"{runs[-1].things}, 0 if they are unrelated."
    )
    return Section("likeness", title, " ".join([intro, *map(_sentence, sentences)]), blocks)


def _heat(matrix: Sequence[Sequence[float]], names: Sequence[str], title: str) -> Figure:
    average = mean_off_diagonal(matrix)
    note = "" if average is None else f"mean over pairs {average:.2f}"
    architecture = [name.partition(" ")[2] or name for name in names]
    drawing = svg.heat_map(matrix, architecture, f"Mutual CKA of {len(names)} clients, {title}. {note}")
    return Figure(title, drawing, note)


def _is_matrix(event: KernelsSeen) -> bool:
    rows, size = event.mutual_cka or [], len(event.clients or [])
    return size > 0 and len(rows) == size and all(len(row) == size and all(map(is_number, row)) for row in rows)


# --- the spectrum ----------------------------------------------------------------------------------


def _spectrum(runs: Sequence[ReportedRun], views: Sequence[View], reasons: Sequence[str]) -> Section:
    title = "Spectrum of the mean kernel"
    figures = []
    lines = [_fractions(view.style, view.label, view.features.spectrum()) for view in views]
    if lines:
        drawing = svg.line_chart(lines, "direction", "Fraction of each direction in the mean kernel", log=True)
        figures.append(Figure("from the encoders' features", drawing))
    for run in runs:
        rounds = [event for event in run.kernels if event.spectrum]
        steps = [rounds[k] for k in shown_rows(len(rounds), 3)] if rounds else []
        lines = []
        for place, event in enumerate(steps):
            style = run.style if place == len(steps) - 1 else f"{run.style} faint{place}"
            lines.append(_fractions(style, f"{run.label}, round {event.round}", event.spectrum))
        drawing = svg.line_chart(lines, "direction", f"Spectrum of the consensus, {run.label}", log=True)
        if drawing:
            which = ", ".join(str(event.round) for event in steps)
            note = f"rounds {which}; faint lines are earlier rounds"
            figures.append(Figure(f"consensus at the server, {run.label}", drawing, note))
    if not figures:
        return Section("spectrum", title, " ".join(map(_sentence, reasons)) or "There is no kernel to show.")
    intro = (
        "The fraction of each direction, largest first. A steep curve means that the clients agree on few directions."
    )
    return Section("spectrum", title, intro, [*legend(runs, bool(views)), Figures(figures)])


def _fractions(style: str, label: str, fractions: Sequence[float]) -> svg.Line:
    marked = (1, 2, 4, 8, 16, 32, 64)
    kept = [(k, fraction) for k, fraction in enumerate(fractions, 1) if is_number(fraction) and fraction > 1e-6]
    words = {k: f"{label}, direction {k}: {fraction:.2%}" for k, fraction in kept if k in marked}
    return svg.Line(style, [(k, fraction, words.get(k, "")) for k, fraction in kept])


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
        return Section("neighbours", title, why or "No encoders are available.")
    count = len(views[0].features.features[0])
    found = [view.features.neighbours(NEIGHBOURS) for view in views]
    clients = views[-1].features.names[:MOST_SHOWN]
    blocks: list[Block] = []
    for query in shown_rows(count, QUERIES + 2)[1:-1]:
        rows: list[list[str | Markup]] = []
        for client in clients:
            row: list[str | Markup] = [views[-1].name(client)]
            for view, near in zip(views, found, strict=True):
                known = client in view.features.names
                row.append(
                    _strip(near[view.features.names.index(client)][query].tolist(), pictures, client) if known else "-"
                )
            rows.append(row)
        blocks.append(Rows(_query(query, pictures), ["client", *[view.label for view in views]], rows, WORDS))
    shared = [(view.label, view.features.shared_neighbours(NEIGHBOURS)) for view in views]
    figures = ", ".join(f"{label} {value:.1f}" for label, value in shared if value is not None)
    intro = f"A few shared images, each with its {NEIGHBOURS} nearest images by each client's encoder, nearest first."
    if figures:
        intro += f" Average number of these {NEIGHBOURS} neighbours that two clients have in common: {figures}."
    intro += _first_shown(views[-1])
    return Section("neighbours", title, intro, [Tiles(blocks)])


def _first_shown(view: View) -> str:
    count = len(view.features.names)
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
        return Section("map", "Map of the RAD", " ".join(map(_sentence, reasons)) or "No encoders are available.")
    together = [
        _map(v.features.mean_kernel, f"mean of all clients, {v.label}", v, pictures, kind)
        for v in before_and_after(views)
    ]
    last = views[-1]
    things = last.run.things
    title = f"Map of the shared {things}"
    single = [
        _map(kernel, last.name(client), last, pictures, kind)
        for client, kernel in list(zip(last.features.names, last.features.kernels, strict=True))[:MOST_SHOWN]
    ]
    intro = f"{things.capitalize()} that are close together are similar to the encoders. The axes have no meaning."
    count = len(last.features.features[0])
    if count > ON_A_MAP:
        intro += f" {ON_A_MAP} of {count} are drawn."
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
    points = [(*places[row], f"{view.run.things[:-1]} {row + 1}") for row in rows]
    label = f"Map of {len(rows)} shared {view.run.things}, {title}; {words}"
    return Figure(title, svg.scatter(points, ids, view.style, label), words)


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."

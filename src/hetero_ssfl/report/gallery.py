"""The sections that need the encoders' features of the RAD: mutual CKA, spectrum, neighbours and maps.

If the encoders are on other machines, these sections say so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from torch import Tensor

from ..errors import HeteroSSFLError
from ..runs.events import KernelsSeen, is_number
from . import charts
from .blocks import TEXT, Block, Figure, Figures, Folded, Rows, Section, Text, Tiles
from .rad_features import FeatureReader, Map, RadFeatures, are_pictures, mean_off_diagonal, plane, shown_rows, thumbnail
from .reported_run import UNTRAINED, ReportedRun, legend
from .tables import without_folders

NEIGHBOURS = 5
QUERIES = 4
MAX_ON_A_MAP = 150
MAX_CLIENTS = 8  # whose neighbours and maps are shown


@dataclass(frozen=True)
class View:
    """The clients' features of the RAD, before or after training."""

    label: str
    style: str
    run: ReportedRun
    features: RadFeatures

    def name(self, client: str) -> str:
        return self.run.name(client)


class Pictures:
    """The RAD images that the sections use, each stored only once in the page: data URLs by id."""

    def __init__(self, run: ReportedRun) -> None:
        self.urls: dict[str, str] = {}
        try:
            rad = run.folder.rad()[0]
        except HeteroSSFLError:
            self.rad: Tensor | None = None
            return
        self.rad = rad[shown_rows(len(rad))] if are_pictures(rad) else None

    def __bool__(self) -> bool:
        return self.rad is not None

    def id_of(self, row: int) -> str:
        assert self.rad is not None
        name = f"rad{row}"
        if name not in self.urls:
            self.urls[name] = thumbnail(self.rad[row])
        return name


def read_views(runs: Sequence[ReportedRun], features: FeatureReader) -> tuple[list[View], str]:
    """Return the untrained view, then each run's trained view, and the reasons for missing ones."""
    views, reasons = [], []
    for run, trained in [(runs[-1], False), *[(run, True) for run in runs]]:
        label, style = (run.label, run.style) if trained else ("untrained", UNTRAINED)
        try:
            views.append(View(label, style, run, features(run.folder, trained)))
        except (HeteroSSFLError, RuntimeError) as error:  # RuntimeError: the model's code has changed since training
            if trained:
                reasons.append(without_folders(f"The encoders of {run.label} cannot be loaded here. {error}"))
    return views, " ".join(reasons)


def gallery(runs: Sequence[ReportedRun], features: FeatureReader, kind: Map) -> tuple[list[Section], dict[str, str]]:
    """Return the sections, and the pictures that they use."""
    views, reasons = read_views(runs, features)
    pictures = Pictures(runs[-1])
    digest = runs[-1].result.facts.get("rad_digest")
    same_rad = [view for view in views if view.run.result.facts.get("rad_digest") == digest]
    trained = [view for view in same_rad if view.style != UNTRAINED]
    compared = [trained[0], trained[-1]] if len(trained) > 1 else same_rad  # two runs, or untrained and trained
    sections = [
        similarity(runs, views, reasons),
        spectrum(runs, views, reasons),
        neighbours(compared, pictures, reasons),
        maps(compared, pictures, kind, reasons),
    ]
    return sections, pictures.urls


# --- mutual CKA ------------------------------------------------------------------------------------


def similarity(runs: Sequence[ReportedRun], views: Sequence[View], reasons: str) -> Section:
    blocks: list[Block] = []
    if views:
        figures = [_heat(v.features.mutual_cka, [v.name(n) for n in v.features.names], v.label) for v in views]
        blocks.append(Figures(figures, "small"))
    for run in runs:
        blocks += _similarity_over_rounds(run)
    limits = dict.fromkeys(view.features.limits for view in views)
    things = runs[-1].things
    intro = f"Mutual CKA: 1 if two clients find the same similarities among the {things}, 0 if they are unrelated."
    intro = " ".join(filter(None, [intro, *limits, reasons, "" if blocks else "There is nothing to compare."]))
    return Section("likeness", f"Similarity of the clients on the shared {things}", intro, blocks)


def _similarity_over_rounds(run: ReportedRun) -> list[Block]:
    rounds = [
        (event.round, event.clients or [], event.mutual_cka or [])
        for event in run.events_of(KernelsSeen)
        if _is_square(event)
    ]
    if not rounds:
        return []
    count = 7 if len(rounds[-1][1]) <= 12 else 3  # with the curve, one or two rows of four
    figures = [
        _heat(matrix, [run.name(client) for client in clients], f"round {number}")
        for number, clients, matrix in (rounds[k] for k in shown_rows(len(rounds), count))
    ]
    means = [(number, mean_off_diagonal(matrix)) for number, _, matrix in rounds]
    line = [(r, value, f"{run.label}, round {r}: {value:.3f}") for r, value in means if value is not None]
    title = "mean over pairs"
    drawing = charts.line_chart([charts.Line(run.style, line)], "round", f"{title}, {run.label}", width=280)
    figures += [Figure(title, drawing)] if drawing else []
    return [Text(f"Kernels that the clients of {run.label} sent in each round:"), Figures(figures, "small")]


def _heat(matrix: Sequence[Sequence[float]], names: Sequence[str], title: str) -> Figure:
    average = mean_off_diagonal(matrix)
    note = "" if average is None else f"mean over pairs {average:.2f}"
    encoders = [name.partition(" ")[2] or name for name in names]
    return Figure(
        title, charts.heat_map(matrix, encoders, f"Mutual CKA of {len(names)} clients, {title}. {note}"), note
    )


def _is_square(event: KernelsSeen) -> bool:
    rows, size = event.mutual_cka or [], len(event.clients or [])
    return size > 0 and len(rows) == size and all(len(row) == size for row in rows)


# --- the spectrum ----------------------------------------------------------------------------------


def spectrum(runs: Sequence[ReportedRun], views: Sequence[View], reasons: str) -> Section:
    title, figures = "Spectrum of the mean kernel", []
    if views:
        lines = [_fractions(view.style, view.label, view.features.spectrum()) for view in views]
        name = "from the encoders' features"
        figures.append(Figure(name, charts.line_chart(lines, "direction", f"{title}, {name}", log=True)))
    for run in runs:
        rounds = [event for event in run.events_of(KernelsSeen) if event.spectrum]
        events = [rounds[k] for k in shown_rows(len(rounds), 3)] if rounds else []
        lines = []
        for place, event in enumerate(events):
            style = run.style if place == len(events) - 1 else f"{run.style} faint{place}"
            lines.append(_fractions(style, f"{run.label}, round {event.round}", event.spectrum))
        drawing = charts.line_chart(lines, "direction", f"Spectrum of the consensus, {run.label}", log=True)
        if drawing:
            note = f"rounds {', '.join(str(event.round) for event in events)}; faint lines are earlier rounds"
            figures.append(Figure(f"consensus at the server, {run.label}", drawing, note))
    if not figures:
        return Section("spectrum", title, reasons or "There is no kernel to show.")
    intro = (
        "The fraction of each direction, largest first. A steep curve means that the clients agree on few directions."
    )
    return Section("spectrum", title, intro, [*legend(runs, bool(views)), Figures(figures)])


def _fractions(style: str, label: str, fractions: Sequence[float]) -> charts.Line:
    marked = (1, 2, 4, 8, 16, 32, 64)
    shown = [(k, fraction) for k, fraction in enumerate(fractions, 1) if is_number(fraction) and fraction > 1e-6]
    words = {k: f"{label}, direction {k}: {fraction:.2%}" for k, fraction in shown if k in marked}
    return charts.Line(style, [(k, fraction, words.get(k, "")) for k, fraction in shown])


# --- neighbours ------------------------------------------------------------------------------------


def neighbours(views: Sequence[View], pictures: Pictures, reasons: str) -> Section:
    title = "Nearest neighbours"
    if not views or not pictures:
        why = "The shared samples are not images, so there is nothing to show." if views else reasons
        return Section("neighbours", title, why or "No encoders are available.")
    nearest = [(view.features.names, view.features.neighbours(NEIGHBOURS)) for view in views]
    clients = views[-1].features.names[:MAX_CLIENTS]
    tables: list[Block] = []
    for query in shown_rows(len(views[0].features.features[0]), QUERIES + 2)[1:-1]:
        rows: list[list[str | Markup]] = []
        for client in clients:
            strips = [
                _strip(near[names.index(client)][query].tolist(), pictures, client) if client in names else "-"
                for names, near in nearest
            ]
            rows.append([views[-1].name(client), *strips])
        label = f"image {query + 1}"
        picture = charts.picture(32, 32, label, charts.use(pictures.id_of(query), 0, 0, 32, label), style="query")
        caption = picture + Markup(" nearest to image {}").format(query + 1)
        tables.append(Rows(caption, ["client", *[view.label for view in views]], rows, TEXT))
    shared = [(view.label, view.features.shared_neighbours(NEIGHBOURS)) for view in views]
    means = ", ".join(f"{label} {value:.1f}" for label, value in shared if value is not None)
    intro = f"A few shared images, each with its {NEIGHBOURS} nearest images by each client's encoder, nearest first."
    if means:
        intro += f" Average number of these {NEIGHBOURS} neighbours that two clients have in common: {means}."
    return Section("neighbours", title, intro + _first_shown(views[-1]), [Tiles(tables)])


def _first_shown(view: View) -> str:
    count = len(view.features.names)
    return f" Shown for the first {MAX_CLIENTS} of {count} clients." if count > MAX_CLIENTS else ""


def _strip(rows: Sequence[int], pictures: Pictures, client: str) -> Markup:
    parts = [
        charts.use(pictures.id_of(row), 1 + 26 * place, 1, 24, f"image {row + 1}") for place, row in enumerate(rows)
    ]
    label = f"nearest for {client}: images {', '.join(str(row + 1) for row in rows)}"
    return charts.picture(26 * len(rows), 26, label, *parts, style="strip")


# --- maps ------------------------------------------------------------------------------------------


def maps(views: Sequence[View], pictures: Pictures, kind: Map, reasons: str) -> Section:
    if not views:
        return Section("map", "Map of the RAD", reasons or "No encoders are available.")
    last = views[-1]
    things, count = last.run.things, len(last.features.features[0])
    together = [_map(v.features.mean_kernel, f"mean of all clients, {v.label}", v, pictures, kind) for v in views]
    kernels = list(zip(last.features.names, last.features.kernels, strict=True))[:MAX_CLIENTS]
    single = [_map(kernel, last.name(client), last, pictures, kind) for client, kernel in kernels]
    intro = f"{things.capitalize()} that are close together are similar to the encoders. The axes have no meaning."
    if count > MAX_ON_A_MAP:
        intro += f" {MAX_ON_A_MAP} of {count} are drawn."
    folded = Folded(f"Client by client, {last.label}.{_first_shown(last)}", [Figures(single)])
    return Section("map", f"Map of the shared {things}", intro, [Figures(together, "large"), folded])


def _map(kernel: Tensor, title: str, view: View, pictures: Pictures, kind: Map) -> Figure:
    rows = shown_rows(len(kernel), MAX_ON_A_MAP)
    places, words = plane(kernel, kind)
    ids = [pictures.id_of(row) for row in rows] if pictures else []
    points = [(*places[row], f"{view.run.things[:-1]} {row + 1}") for row in rows]
    return Figure(title, charts.scatter(points, ids, view.style, f"Map of the RAD, {title}; {words}"), words)

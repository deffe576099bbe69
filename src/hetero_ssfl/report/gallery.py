"""The sections that need the encoders' features of the RAD: mutual CKA, spectrum, neighbours and maps.

If the encoders are on other machines, these sections say so.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from markupsafe import Markup
from torch import Tensor

from ..errors import HeteroSSFLError
from ..kernels.cka import mutual_cka
from ..runs.events import KernelsSeen, is_number
from .blocks import TEXT, Block, Figure, Figures, Folded, Rows, Section, Text, Tiles
from .plots import WIDTH, Line, chart, heat_chart, line_chart, mean_off_diagonal, scatter
from .rad_features import FeatureReader, Map, RadFeatures, are_pictures, plane, shown_rows, thumbnail
from .reported_run import UNTRAINED, ReportedRun, legend
from .tables import without_folders

NEIGHBOURS = 5
QUERIES = 4
MAX_ON_A_MAP = 150
MAX_CLIENTS = 8  # whose neighbours and maps are shown


class View(NamedTuple):
    """The clients' features of the RAD, before or after training."""

    label: str
    style: str
    run: ReportedRun
    features: RadFeatures


class Pictures:
    """The RAD images that the sections use, each stored only once in the page: data URLs by id."""

    def __init__(self, run: ReportedRun) -> None:
        self.urls: dict[str, str] = {}
        self.rad: Tensor | None = None
        with suppress(HeteroSSFLError):
            rad = run.folder.rad()[0]
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
            views.append(View(label, style, run, features(run.folder, trained).by_name()))
        except (HeteroSSFLError, RuntimeError) as error:  # RuntimeError: the model's code has changed since training
            if trained:
                reasons.append(without_folders(f"The encoders of {run.label} cannot be loaded here. {error}"))
    return views, " ".join(reasons)


Cards = list[tuple[str, str, str]]


def gallery(
    runs: Sequence[ReportedRun], features: FeatureReader, kind: Map
) -> tuple[list[Section], dict[str, str], Cards]:
    """Return the sections, their pictures, and cards (style, value, description) of how much the clients agree."""
    views, reasons = read_views(runs, features)
    pictures = Pictures(runs[-1])
    digest = runs[-1].facts.get("rad_digest")
    same_rad = [view for view in views if view.run.facts.get("rad_digest") == digest]
    trained = [view for view in same_rad if view.style != UNTRAINED]
    compared = [trained[0], trained[-1]] if len(trained) > 1 else same_rad  # two runs, or untrained and trained
    sections = [similarity(runs, views, reasons), spectrum(runs, views, reasons)]
    sections += [neighbours(compared, pictures, reasons), maps(compared, pictures, kind, reasons)]
    if not any(scores for run in runs for scores in run.results["clients"].values()):
        sections = [sections[2], sections[0], sections[3], sections[1]]  # without accuracies, pictures come first
    return sections, pictures.urls, [card for view in same_rad for card in agreement(view)]


def agreement(view: View) -> Cards:
    alike = mean_off_diagonal(mutual_cka(view.features.features).tolist())
    common = view.features.shared_neighbours(NEIGHBOURS)
    if alike is None or common is None:
        return []
    what = f"of {NEIGHBOURS} nearest images that two clients have in common, {view.label}"
    return [
        (view.style, f"{alike:.2f}", f"agreement of the clients (mutual CKA), {view.label}"),
        (view.style, f"{common:.1f}", what),
    ]


def similarity(runs: Sequence[ReportedRun], views: Sequence[View], reasons: str) -> Section:
    heats = [_heat(v.run, v.features.names, mutual_cka(v.features.features).tolist(), v.label) for v in views]
    blocks: list[Block] = [Figures(heats, "small")] if views else []
    for run in runs:
        blocks += _similarity_over_rounds(run)
    things, limits = runs[-1].things, dict.fromkeys(view.features.limits for view in views)
    intro = f"Mutual CKA: 1 if two clients find the same similarities among the {things}, 0 if they are unrelated."
    intro = " ".join(filter(None, [intro, *limits, reasons, "" if blocks else "There is nothing to compare."]))
    return Section("likeness", f"Similarity of the clients on the shared {things}", intro, blocks)


def _similarity_over_rounds(run: ReportedRun) -> list[Block]:
    seen = [(e.round, e.clients or [], e.mutual_cka or []) for e in run.events_of(KernelsSeen)]
    rounds = [(r, c, matrix) for r, c, matrix in seen if c and [len(row) for row in matrix] == [len(c)] * len(c)]
    if not rounds:
        return []
    count = 7 if len(rounds[-1][1]) <= 12 else 3  # with the curve, one or two rows of four
    shown = [rounds[k] for k in shown_rows(len(rounds), count)]
    figures = [_heat(run, clients, matrix, f"round {number}") for number, clients, matrix in shown]
    means = [(number, mean_off_diagonal(matrix)) for number, _, matrix in rounds]
    line = Line(run.style, [(r, v, f"{run.label}, round {r}: {v:.3f}") for r, v in means if v is not None])
    drawing = line_chart([line], "round", f"mean over pairs, {run.label}", width=280)
    figures += [Figure("mean over pairs", drawing)] if drawing else []
    return [Text(f"Kernels that the clients of {run.label} sent in each round:"), Figures(figures, "small")]


def _heat(run: ReportedRun, clients: Sequence[str], matrix: Sequence[Sequence[float]], title: str) -> Figure:
    average = mean_off_diagonal(matrix)
    note = "" if average is None else f"mean over pairs {average:.2f}"
    return Figure(title, heat_chart(matrix, clients, f"Mutual CKA of {len(clients)} clients, {title}. {note}"), note)


def spectrum(runs: Sequence[ReportedRun], views: Sequence[View], reasons: str) -> Section:
    title, name, figures = "Spectrum of the mean kernel", "from the encoders' features", []
    if views:
        lines = [_fractions(view.style, view.label, view.features.spectrum.tolist()) for view in views]
        figures.append(Figure(name, line_chart(lines, "direction", f"{title}, {name}", log=True)))
    for run in runs:
        rounds = [event for event in run.events_of(KernelsSeen) if event.spectrum]
        events = [rounds[k] for k in shown_rows(len(rounds), 3)]
        lines = [_fractions(run.style, f"{run.label}, round {e.round}", e.spectrum) for e in events]
        faded = [line._replace(look={"alpha": alpha}) for line, alpha in zip(lines[::-1], (1, 0.6, 0.35), strict=False)]
        drawing = line_chart(faded[::-1], "direction", f"Spectrum of the consensus, {run.label}", log=True)
        note = f"rounds {', '.join(str(event.round) for event in events)}; faint lines are earlier rounds"
        figures += [Figure(f"consensus at the server, {run.label}", drawing, note)] if drawing else []
    if not figures:
        return Section("spectrum", title, reasons or "There is no kernel to show.")
    intro = "The fraction of each direction, largest first. A steep curve: the clients agree on few directions."
    return Section("spectrum", title, intro, [*legend(runs, bool(views)), Figures(figures)])


def _fractions(style: str, label: str, fractions: Sequence[float]) -> Line:
    shown = [(k, fraction) for k, fraction in enumerate(fractions, 1) if is_number(fraction) and fraction > 1e-6]
    words = {k: f"{label}, direction {k}: {fraction:.2%}" for k, fraction in shown if k.bit_count() == 1}
    return Line(style, [(k, fraction, words.get(k, "")) for k, fraction in shown])


def neighbours(views: Sequence[View], pictures: Pictures, reasons: str) -> Section:
    title = "Nearest neighbours"
    if not views or not pictures:
        why = "The shared samples are not images, so there is nothing to show." if views else reasons
        return Section("neighbours", title, why or "No encoders are available.")
    near = [dict(zip(v.features.names, v.features.neighbours(NEIGHBOURS), strict=True)) for v in views]
    last, tables = views[-1], []
    for query in shown_rows(len(views[0].features.features[0]), QUERIES + 2)[1:-1]:
        rows: list[list[str | Markup]] = []
        for c in last.features.names[:MAX_CLIENTS]:
            found = [of[c][query].tolist() if c in of else [] for of in near]
            strips = [_strip(nearest, pictures, f"nearest for {c}: images") if nearest else "-" for nearest in found]
            rows.append([last.run.name(c), *strips])
        caption = _strip([query], pictures, "image", "query")
        caption += Markup(" nearest to image {}").format(query + 1)
        tables.append(Rows(caption, ["client", *[view.label for view in views]], rows, TEXT))
    shared = [(view.label, view.features.shared_neighbours(NEIGHBOURS)) for view in views]
    means = ", ".join(f"{label} {value:.1f}" for label, value in shared if value is not None)
    intro = f"A few shared images, each with its {NEIGHBOURS} nearest images by each client's encoder, nearest first."
    if means:
        intro += f" Average number of these {NEIGHBOURS} neighbours that two clients have in common: {means}."
    return Section("neighbours", title, intro + _first_shown(last), [Tiles(tables)])


def _first_shown(view: View) -> str:
    count = len(view.features.names)
    return f" Shown for the first {MAX_CLIENTS} of {count} clients." if count > MAX_CLIENTS else ""


def _strip(rows: Sequence[int], pictures: Pictures, label: str, style: str = "strip") -> Markup:
    """Draw pictures side by side."""
    use = Markup('<use href="#{}" transform="translate({} 1) scale(24)"><title>image {}</title></use>')
    uses = Markup("").join(use.format(pictures.id_of(row), 1 + 26 * k, row + 1) for k, row in enumerate(rows))
    box = Markup('<svg viewBox="0 0 {} 26" role="img" aria-label="{} {}" class="{}">{}</svg>')
    return box.format(26 * len(rows), label, ", ".join(str(row + 1) for row in rows), style, uses)


def maps(views: Sequence[View], pictures: Pictures, kind: Map, reasons: str) -> Section:
    if not views:
        return Section("map", "Map of the RAD", reasons or "No encoders are available.")
    last = views[-1]
    things, count = last.run.things, len(last.features.features[0])
    means = [(view, torch.stack(view.features.kernels).mean(0)) for view in views]
    together = [_map(mean, f"mean of all clients, {view.label}", view, pictures, kind) for view, mean in means]
    kernels = list(zip(last.features.names, last.features.kernels, strict=True))[:MAX_CLIENTS]
    single = [_map(kernel, last.run.name(client), last, pictures, kind) for client, kernel in kernels]
    intro = f"{things.capitalize()} that are close together are similar to the encoders. The axes have no meaning."
    if count > MAX_ON_A_MAP:
        intro += f" {MAX_ON_A_MAP} of {count} are drawn."
    folded = Folded(f"Client by client, {last.label}.{_first_shown(last)}", [Figures(single)])
    return Section("map", f"Map of the shared {things}", intro, [Figures(together, "large"), folded])


def _map(kernel: Tensor, title: str, view: View, pictures: Pictures, kind: Map) -> Figure:
    rows = shown_rows(len(kernel), MAX_ON_A_MAP)
    places, words = plane(kernel, kind)
    ids = [pictures.id_of(row) for row in rows] if pictures else []
    points = [(places[row][0], places[row][1], f"{view.run.things[:-1]} {row + 1}") for row in rows]
    label, style = f"Map of the RAD, {title}; {words}", "chart plane"
    drawing = chart(label, lambda axes: scatter(axes, points, ids, view.style), (WIDTH, WIDTH), (2, 2, 2, 2), style)
    return Figure(title, drawing, words)

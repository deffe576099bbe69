"""The sections about results. If a run lacks something, its section says so."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from . import svg
from .blocks import Block, Figure, Figures, Folded, Rows, Section
from .reported_run import ReportedRun, without_folders
from .status import duration
from .tables import Result, compare_rows, metric_names, spread
from .wording import MOST_ROWS, UNTRAINED, bytes_of, legend, metric_words, names_of, probed_on, volume

MOST_DRAWN = 30
MOST_CURVES = 12
FIGURES = {
    "loss_ssl": "loss on own {things}",
    "loss_alignment": "alignment loss, 0 is full agreement",
    "effective_rank": "effective rank of a client's kernel",
    "spread": "feature spread, 0 is collapse",
    "batch_rank": "effective rank within a batch",
    "drift": "distance that training moved the encoder",
}
SERVER_FIGURES = {
    "consensus_effective_rank": "effective rank of the consensus",
    "consensus_lost_share": "fraction of the mean kernel that is not sent",
}


# --- the top of the page ---------------------------------------------------------------------------


def summary(runs: Sequence[ReportedRun], metric: str | None) -> list[str]:
    """Return sentences about the runs, their data and the result."""
    last = runs[-1]
    config = last.result.config
    encoders = {last.encoder(client) for client in last.clients} - {""}
    who = _count(len(last.clients), "client")
    who += f" with {len(encoders)} different encoders" if len(encoders) > 1 else " with the same encoder"
    data = f"images of {without_folders(config.data.source)}"
    if last.folder.read_facts().site != "simulated":
        data = f"{last.things} of their own"
    seeds = ", ".join(map(str, sorted({run.result.config.seed for run in runs})))
    span = f"{_count(config.rounds, 'round')}, seed {seeds}"
    if len(runs) == 1:
        how = f"trained with {config.method}"
        labels = "" if last.method is None else "labeled " if last.method.needs_labels else "unlabeled "
        sentences = [f"{who} {how}. They trained on {labels}{data} for {span}."]
    else:
        named = ", ".join(f"{run.label} ({run.result.config.method})" for run in runs)
        sentences = [f"{_count(len(runs), 'run')} are compared: {named}. {who}, {data}, {span}."]
    sentences += _outcome(runs, metric)
    for run in runs:
        if not run.finished:
            sentences.append(
                f"{run.label} is not finished: {run.rounds_done} of {_count(run.result.config.rounds, 'round')} done."
            )
    for run in runs:
        if run.result.never_trained:
            left, everyone = len(run.result.never_trained), _count(len(run.result.results["clients"]), "client")
            sentences.append(f"{run.label}: {left} of {everyone} never trained and are not part of the means.")
    lost = sum(what == "left out" for run in runs for _, _, what, _ in run.faults())
    if lost:
        sentences.append(
            f"{_count(lost, 'reply', 'replies')} {'was' if lost == 1 else 'were'} left out: see Faults and exclusions."
        )
    return sentences


def _outcome(runs: Sequence[ReportedRun], metric: str | None) -> list[str]:
    if metric is None:
        return ["There are no labels, so accuracy cannot be measured."]
    last, base = runs[-1].result, _baseline(runs)
    scores = last.scores(metric)
    if not scores:
        return []
    words = f"With {runs[-1].label} the" if len(runs) > 1 else "The"
    words += f" mean accuracy is {mean(scores):.1f} % on {probed_on(runs)} ({metric_words(metric)})"
    pairs = [(last.trained_score(c, metric), base.get(c, {}).get(metric)) for c in last.results["clients"]]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return [words + "."]
    gain, start = mean(a - b for a, b in known), mean(b for _, b in known)
    than = "untrained" if len(runs) == 1 else runs[0].label
    side, better = "below" if gain < 0 else "above", sum(a > b for a, b in known)
    words += f", {abs(gain):.1f} points {side} {than} ({start:.1f} %)"
    return [f"{words}; better for {better} of {_count(len(known), 'client')}."]


def key_figures(runs: Sequence[ReportedRun], metric: str | None) -> list[tuple[str, str, str]]:
    """Return (style, figure, description) for the cards under the summary."""
    cards = []
    if metric:
        if runs[-1].untrained:
            cards.append((UNTRAINED, _percent(_column(runs[-1].untrained, metric)), "untrained"))
        for run, name in list(zip(runs, names_of(runs), strict=True))[-5:]:
            cards.append((run.style, _percent(run.result.scores(metric)), name))
    last = runs[-1]
    up, down = (sum(bytes_of(last, key).values()) for key in ("bytes_up", "bytes_down"))
    cards.append(("", volume(up + down), "sent in total, up and down" + (f", {last.label}" if len(runs) > 1 else "")))
    seconds = sum(value for _, value in last.server_series("seconds"))
    return [*cards, ("", duration(seconds), "in rounds" + (f", {last.label}" if len(runs) > 1 else ""))]


# --- accuracy --------------------------------------------------------------------------------------


def accuracy(runs: Sequence[ReportedRun], metric: str | None) -> Section:
    title = "Accuracy and classes of each client"
    held = _holdings(runs)
    if metric is None:
        reason = "There are no accuracies: the data have no labels, or the run has not been evaluated."
        blocks: list[Block] = [Figures(held, "large")] if held else []
        return Section(
            "accuracy", title, reason if held else f"{reason} The classes of the clients are not known either.", blocks
        )
    last, base = runs[-1], _baseline(runs)
    clients = [c for c in last.clients if any(run.result.score(c, metric) is not None for run in runs)]
    marks = {client: _marks(runs, client, metric) for client in clients}
    averages = [(UNTRAINED, _column(last.untrained, metric), "untrained")] if last.untrained else []
    averages += [(run.style, run.result.scores(metric), run.label) for run in runs]
    means = [(style, mean(values), f"mean, {label}: {mean(values):.1f}") for style, values, label in averages if values]
    drawn = [(last.name(client), marks[client]) for client in clients[:MOST_DRAWN]]
    words = f"accuracy (%), {metric_words(metric)}"
    label = f"Accuracy of each client. {'; '.join(text for _, _, text in means)}."
    drawing = svg.dot_plot([*drawn, ("mean over clients", means)], words, label)
    evaluation = last.result.config.evaluation
    given = f" with {evaluation.labels_per_class} labels per class" if evaluation.labels_per_class else ""
    intro = f"On {probed_on(runs)} of every class; {metric_words(metric)}, on the frozen encoder{given}."
    if len(clients) > MOST_DRAWN:
        intro += f" The first {MOST_DRAWN} of {len(clients)} clients are drawn."
    if not held:
        intro += " The classes of the clients are not known: participants brought their own data."
    blocks = [
        *legend(runs, bool(last.untrained)),
        Figures([Figure("Accuracy, client by client", drawing), *held], "large"),
        _accuracy_table(runs, clients, base, metric),
    ]
    others = [name for name in metric_names(last.result) if name != metric]
    if others:
        blocks.append(Folded("Other probes", [_other_probes(runs, others)]))
    blocks += _over_seeds(runs, metric)
    return Section("accuracy", title, intro, blocks)


def _holdings(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Draw how many images of each class each client has; one figure per distinct division of the data."""
    divided: dict[str, ReportedRun] = {}
    for run in reversed(runs):
        if run.result.facts.get("holdings"):
            divided.setdefault(str(run.result.facts["holdings"]), run)
    figures = []
    for run in divided.values():
        counts, classes = run.result.facts["holdings"], list(run.result.facts.get("classes", []))
        drawn = list(counts.items())[:MOST_DRAWN]
        title = f"{run.things.capitalize()} of each class"
        label = f"{title} at each client. " + "; ".join(
            f"{client}: {run.result.holdings(client)}" for client in list(counts)[:12]
        )
        total = f"{sum(map(sum, counts.values())):,} {run.things} at {_count(len(counts), 'client')}"
        note = f"{total}; the area of a circle is their number."
        if len(counts) > MOST_DRAWN:
            note += f" The first {MOST_DRAWN} clients are drawn."
        if all(a.method and not a.method.needs_labels for a in runs):
            note += " Labels are used only to divide the data: no loss uses them."
        name = title + (f", {run.label}" if len(divided) > 1 else "")
        figures.append(Figure(name, svg.bubbles(drawn, classes, run.style, label), note))
    return figures


def _marks(runs: Sequence[ReportedRun], client: str, metric: str) -> list[tuple[str, float, str]]:
    start = runs[-1].untrained.get(client, {}).get(metric)
    marks = [] if start is None else [(UNTRAINED, start, f"{client}, untrained: {start:.1f}")]
    for run in runs:
        value = run.result.score(client, metric)
        if value is not None:
            marks.append((run.style, value, f"{client}, {run.label}: {value:.1f}"))
    return marks


def _accuracy_table(runs: Sequence[ReportedRun], clients: list[str], base: Mapping[str, Any], metric: str) -> Rows:
    last = runs[-1]
    rows = []
    for client in clients[:MOST_ROWS]:
        score, start = last.result.trained_score(client, metric), base.get(client, {}).get(metric)
        parameters = last.models[client].get("parameters")
        row = [
            f"{client} (never trained)" if client in last.result.never_trained else client,
            _figure(last.untrained.get(client, {}).get(metric)),
            *[_figure(run.result.score(client, metric)) for run in runs],
            "-" if score is None or start is None else f"{score - start:+.1f}",
            f"{parameters:,}" if isinstance(parameters, int) else "-",
            last.result.holdings(client) or "-",
            last.encoder(client) or "-",
        ]
        rows.append(row)
    columns = [_column(last.untrained, metric), *[run.result.scores(metric) for run in runs]]
    gains = [float(row[-4]) for row in rows if row[-4] != "-"]
    foot = [["mean ± sd", *map(spread, columns), f"{mean(gains):+.1f}" if gains else "-", "", "", ""]]
    for run in runs:
        shared = run.result.results.get("global", {}).get(metric)
        if shared is not None:
            others = ["" for _ in runs]
            others[list(runs).index(run)] = _figure(shared)
            foot.append(["global model", "", *others, "", "", "", ""])
    than = "difference to " + ("untrained" if len(runs) == 1 else runs[0].label)
    head = ["client", "untrained", *names_of(runs), than, "parameters", "classes", "encoder"]
    more = f"; the first {MOST_ROWS} of {len(clients)}" if len(clients) > MOST_ROWS else ""
    return Rows(f"Accuracy in percent, {metric_words(metric)}{more}", head, rows, range(1, len(runs) + 4), foot)


def _other_probes(runs: Sequence[ReportedRun], metrics: Sequence[str]) -> Rows:
    rows = [
        [
            metric_words(metric),
            spread(_column(runs[-1].untrained, metric)),
            *[spread(a.result.scores(metric)) for a in runs],
        ]
        for metric in metrics
    ]
    return Rows("Mean ± deviation over clients, percent", ["probe", "untrained", *names_of(runs)], rows)


def _over_seeds(runs: Sequence[ReportedRun], metric: str) -> list[Block]:
    """Return a table over seeds if some runs differ only in the seed."""
    results: list[Result] = [run.result for run in runs]
    if len({r.settings for r in results}) == len(results):
        return []
    rows = [
        [
            row["run"],
            ", ".join(map(str, row["seeds"])),
            _figure(row["mean"]),
            _figure(row["sd_over_seeds"]),
            "-" if row["difference_to_first"] is None else f"{row['difference_to_first']:+.1f}",
            "-" if row["interval"] is None else "{:+.1f} to {:+.1f}".format(*row["interval"]),
        ]
        for row in compare_rows(results, metric)
    ]
    head = ["settings", "seeds", "mean", "sd over seeds", "difference", "95 % interval"]
    return [Rows("Over seeds: difference to the first on equal seeds, paired by client", head, rows, range(2, 6))]


# --- over the rounds -------------------------------------------------------------------------------


def curves(runs: Sequence[ReportedRun], metric: str | None) -> Section:
    figures = []
    if metric:
        figures += _curve(runs, f"validation:{metric}", f"validation accuracy (%), {metric_words(metric)}")
    reported = sorted({key for run in runs for key in run.client_figures}, key=lambda k: ([*FIGURES, k].index(k), k))
    for key in reported:
        words = FIGURES[key].format(things=runs[-1].things) if key in FIGURES else key.replace("_", " ")
        figures += _curve(runs, key, words)
    for key, words in SERVER_FIGURES.items():
        points = [[(r, v, f"{run.label}, round {r}: {v:.3g}") for r, v in run.server_series(key)] for run in runs]
        lines = [svg.Line(run.style, found) for run, found in zip(runs, points, strict=True) if found]
        if any(value for found in points for _, value, _ in found):  # not for a kernel that is sent whole
            figures.append(Figure(words, svg.line_chart(lines, "round", f"{words} over the rounds", span=_span(runs))))
    if not figures:
        return Section("rounds", "Round by round", "No round has been finished yet.")
    intro = "Lines are means over clients; bands reach from the lowest to the highest client."
    if len(runs) == 1:
        intro += " Thin lines are single clients."
    if len(figures) > MOST_CURVES:
        intro += f" The first {MOST_CURVES} of {len(figures)} figures are drawn; events.jsonl has all."
    return Section("rounds", "Round by round", intro, [*legend(runs), Figures(figures[:MOST_CURVES])])


def _span(runs: Sequence[ReportedRun]) -> tuple[int, int]:
    """Return the range of rounds, the same for all curves."""
    return 0, max(1, *(run.rounds_done for run in runs))


def _curve(runs: Sequence[ReportedRun], key: str, title: str) -> list[Figure]:
    lines, ends = [], []
    for run in runs:
        series = run.series(key)
        by_round: dict[int, list[float]] = {}
        for points in series.values():
            for number, value in points:
                by_round.setdefault(number, []).append(value)
        if not any(value for values in by_round.values() for value in values):
            continue  # a term that the method does not have is always zero
        if len(runs) == 1 and 1 < len(series) <= 12:
            lines += [svg.Line(f"{run.style} thin", [(r, v, "") for r, v in points]) for points in series.values()]
        ordered = sorted(by_round.items())
        middle = [
            (r, mean(v), f"{run.label}, round {r}: {mean(v):.3g} ({min(v):.3g} to {max(v):.3g})") for r, v in ordered
        ]
        lines.append(svg.Line(run.style, middle, [(r, min(v), max(v)) for r, v in ordered]))
        ends.append(f"{run.label} from {middle[0][1]:.3g} to {middle[-1][1]:.3g}")
    drawing = svg.line_chart(lines, "round", f"{title} over the rounds: {'; '.join(ends)}.", span=_span(runs))
    return [Figure(title, drawing)] if drawing else []


# --- helpers ---------------------------------------------------------------------------------------


def _baseline(runs: Sequence[ReportedRun]) -> Mapping[str, Mapping[str, float]]:
    """Return the scores to compare the last run with: those of the first run, or of the untrained encoders."""
    if len(runs) == 1:
        return runs[-1].untrained
    first = runs[0].result
    return {name: scores for name, scores in first.results["clients"].items() if name not in first.never_trained}


def _column(scores: Mapping[str, Mapping[str, float]], metric: str) -> list[float]:
    return [values[metric] for values in scores.values() if metric in values]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(values: list[float]) -> str:
    return f"{mean(values):.1f} %" if values else "-"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"

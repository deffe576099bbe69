"""The sections about results: the runs, accuracy, and curves over the rounds."""

from collections.abc import Mapping, Sequence
from statistics import mean

from . import charts
from .blocks import TEXT, Block, Figure, Figures, Folded, Rows, Section
from .reported_run import MAX_ROWS, UNTRAINED, ReportedRun, Series, legend
from .tables import (
    COMPARED,
    compare_cells,
    compare_rows,
    duration,
    floor_rows,
    metric_names,
    number,
    signed,
    spread,
    volume,
    without_folders,
)

MAX_DRAWN = 30  # clients in a chart
MAX_CURVES = 12
CLIENT_METRICS = {
    "loss_ssl": "loss on own {things}",
    "loss_alignment": "alignment loss, 0 is full agreement",
    "effective_rank": "effective rank of a client's kernel",
    "spread": "feature spread, 0 is collapse",
    "batch_rank": "effective rank within a batch",
    "drift": "distance that training moved the encoder",
}
SERVER_METRICS = {
    "consensus_effective_rank": "effective rank of the consensus",
    "consensus_lost_share": "fraction of the mean kernel that is not sent",
}


PROBES = {"linear": "linear probe", "knn": "nearest neighbours", "finetune": "fine-tuned"}
CLASSES = {"all": "all classes", "own": "own classes"}


def plain_metric(metric: str) -> str:
    return ", ".join({**PROBES, **CLASSES}.get(part, part) for part in metric.split("_"))


# --- the top of the page ---------------------------------------------------------------------------


def summary(runs: Sequence[ReportedRun], metric: str | None) -> Rows:
    """Return a table with a column per run and a row per fact."""
    columns = [_facts(run, runs, metric) for run in runs]
    keys = list(dict.fromkeys(key for facts in columns for key in facts))
    rows = [[key, *[facts.get(key, "-") for facts in columns]] for key in keys]
    return Rows("The runs of this page", ["", *[run.label for run in runs]], rows, TEXT)


def _facts(run: ReportedRun, runs: Sequence[ReportedRun], metric: str | None) -> dict[str, str]:
    config, result = run.result.config, run.result
    simulated = result.facts["site"] == "simulated"
    data = f"images of {without_folders(config.data.source)}" if simulated else f"{run.things} of their own"
    labels = "" if run.method is None else "labeled " if run.method.needs_labels else "unlabeled "
    facts = {
        "method": config.method,
        "clients": str(len(run.clients)),
        "different encoders": str(len({run.encoder(client) for client in run.clients} - {""}) or "-"),
        "trained on": labels + data,
        "rounds done": f"{run.rounds_done} of {config.rounds}",
        "seed": str(config.seed),
    }
    left_out = sum(what == "left out" for _, _, what, _ in run.faults())
    if left_out:
        facts["replies left out"] = str(left_out)
    if result.never_trained:
        facts["clients that never trained"] = f"{len(result.never_trained)} of {len(result.results['clients'])}"
    if metric is None:
        return {**facts, "mean accuracy": "unknown: the data have no labels, or the run has not been evaluated"}
    base, name = _baseline(runs)
    pairs = [(result.trained_score(client, metric), base.get(client, {}).get(metric)) for client in run.clients]
    gains = [score - start for score, start in pairs if score is not None and start is not None]
    facts["mean accuracy"] = f"{_percent(result.scores(metric))} ({plain_metric(metric)}, {_split(runs)} {run.things})"
    if gains and run.label != name:
        better = f"higher for {sum(gain > 0 for gain in gains)} of {len(gains)} clients"
        facts[f"difference to {name}"] = f"{signed(mean(gains))}, {better}"
    return facts


def key_metrics(runs: Sequence[ReportedRun], metric: str | None) -> list[tuple[str, str, str]]:
    """Return (style, value, description) for the cards at the top."""
    cards, last = [], runs[-1]
    if metric:
        if last.untrained:
            cards.append((UNTRAINED, _percent(_column(last.untrained, metric)), "untrained"))
        floors = {floor: last.result.floor(floor, metric) for floor in last.result.floors}
        known = {floor: scores for floor, scores in floors.items() if scores}
        if known:
            best = max(known, key=lambda floor: mean(known[floor]))
            cards.append((UNTRAINED, _percent(known[best]), f"floor: {best}"))
        cards += [(run.style, _percent(run.result.scores(metric)), run.label) for run in runs[-5:]]
    sent = sum(sum(last.bytes_of(key).values()) for key in ("bytes_up", "bytes_down"))
    cards.append(("", volume(sent), f"sent in total, up and down, {last.label}"))
    return [*cards, ("", duration(last.seconds), f"in rounds, {last.label}")]


# --- accuracy --------------------------------------------------------------------------------------


def accuracy(runs: Sequence[ReportedRun], metric: str | None) -> Section:
    title, last, holdings = "Accuracy and classes of each client", runs[-1], _holdings(runs)
    if metric is None:
        intro = "There are no accuracies: the data have no labels, or the run has not been evaluated."
        return Section("accuracy", title, intro, [Figures(holdings, "large")] if holdings else [])
    clients = [c for c in last.clients if any(run.result.score(c, metric) is not None for run in runs)]
    labels_per_class = last.result.config.evaluation.labels_per_class
    given = f" with {labels_per_class} labels per class" if labels_per_class else ""
    intro = f"On {_split(runs)} {last.things}; {plain_metric(metric)}, on the frozen encoder{given}."
    intro += _shown(MAX_DRAWN, len(clients), "clients are drawn")
    if not holdings:
        intro += " The classes of the clients are not known: participants brought their own data."
    blocks: list[Block] = [
        *legend(runs, bool(last.untrained)),
        Figures([_accuracy_of_clients(runs, clients, metric), *holdings], "large"),
        _accuracy_table(runs, clients, metric),
    ]
    if last.result.floors:
        names = metric_names(last.result)
        cells = [[floor, *[spread(last.result.floor(floor, m)) for m in names]] for floor in last.result.floors]
        caption = "Floors: the same probes on features that nobody trained, percent"
        blocks.append(Rows(caption, ["features", *map(plain_metric, names)], cells))
    others = [name for name in metric_names(last.result) if name != metric]
    if others:
        head = ["probe", "untrained", *[run.label for run in runs]]
        rows = [
            [plain_metric(m), spread(_column(last.untrained, m)), *[spread(r.result.scores(m)) for r in runs]]
            for m in others
        ]
        blocks.append(Folded("Other probes", [Rows("Mean ± deviation over clients, percent", head, rows)]))
    results = [run.result for run in runs]
    if len({result.settings for result in results}) < len(results):  # some runs differ only in the seed
        caption = "Over seeds: difference to the first on equal seeds, paired by client"
        blocks.append(
            Rows(caption, COMPARED, compare_cells([*floor_rows(results, metric), *compare_rows(results, metric)]))
        )
    return Section("accuracy", title, intro, blocks)


def _accuracy_of_clients(runs: Sequence[ReportedRun], clients: Sequence[str], metric: str) -> Figure:
    last = runs[-1]

    def mark(style: str, client: str, label: str, value: float | None) -> list[tuple[str, float, str]]:
        return [] if value is None else [(style, value, f"{client}, {label}: {value:.1f}")]

    rows = []
    for client in clients[:MAX_DRAWN]:
        marks = mark(UNTRAINED, client, "untrained", last.untrained.get(client, {}).get(metric))
        marks += [m for run in runs for m in mark(run.style, client, run.label, run.result.score(client, metric))]
        rows.append((last.name(client), marks))
    columns = [(UNTRAINED, "untrained", _column(last.untrained, metric))]
    columns += [(run.style, run.label, run.result.scores(metric)) for run in runs]
    means = [m for style, label, values in columns if values for m in mark(style, "mean", label, mean(values))]
    drawing = charts.dot_plot(
        [*rows, ("mean over clients", means)], f"accuracy (%), {plain_metric(metric)}", "Accuracy, client by client"
    )
    return Figure("Accuracy, client by client", drawing)


def _holdings(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Draw how many images of each class each client has; one figure per distinct division of the data."""
    divided = {str(run.result.facts["holdings"]): run for run in reversed(runs) if run.result.facts.get("holdings")}
    figures = []
    for run in divided.values():
        counts, classes = run.result.facts["holdings"], list(run.result.facts.get("classes", []))
        name = f"{run.things.capitalize()} of each class" + (f", {run.label}" if len(divided) > 1 else "")
        total = f"{sum(map(sum, counts.values())):,} {run.things}"
        note = f"{total}; the area of a circle is their number."
        note += _shown(MAX_DRAWN, len(counts), "clients are drawn")
        if all(other.method and not other.method.needs_labels for other in runs):
            note += " Labels are used only to divide the data: no loss uses them."
        figures.append(Figure(name, charts.bubbles(list(counts.items())[:MAX_DRAWN], classes, run.style, name), note))
    return figures


def _accuracy_table(runs: Sequence[ReportedRun], clients: list[str], metric: str) -> Rows:
    last, (base, name) = runs[-1], _baseline(runs)
    rows, gains = [], []
    for client in clients[:MAX_ROWS]:
        score, start = last.result.trained_score(client, metric), base.get(client, {}).get(metric)
        gain = None if score is None or start is None else score - start
        gains += [] if gain is None else [gain]
        parameters = last.models[client].get("parameters")
        row = [
            f"{client} (never trained)" if client in last.result.never_trained else client,
            number(last.untrained.get(client, {}).get(metric)),
            *[number(run.result.score(client, metric)) for run in runs],
            signed(gain),
            f"{parameters:,}" if isinstance(parameters, int) else "-",
            last.result.holdings(client) or "-",
            last.encoder(client) or "-",
        ]
        rows.append(row)
    columns = [_column(last.untrained, metric), *[run.result.scores(metric) for run in runs]]
    foot = [["mean ± sd", *map(spread, columns), signed(mean(gains) if gains else None), "", "", ""]]
    shared = [run.result.results.get("global", {}).get(metric) for run in runs]
    if any(value is not None for value in shared):
        foot.append(["global model", "", *[number(value) for value in shared], "", "", "", ""])
    head = [
        "client",
        "untrained",
        *[r.label for r in runs],
        f"difference to {name}",
        "parameters",
        "classes",
        "encoder",
    ]
    caption = f"Accuracy in percent, {plain_metric(metric)}." + _shown(MAX_ROWS, len(clients), "clients are listed")
    return Rows(caption, head, rows, range(1, len(runs) + 4), foot)


# --- over the rounds -------------------------------------------------------------------------------


def curves(runs: Sequence[ReportedRun], metric: str | None) -> Section:
    titles = {key: words.format(things=runs[-1].things) for key, words in CLIENT_METRICS.items()}
    reported = set().union(*[run.client_metrics for run in runs])
    titles |= {key: key.replace("_", " ") for key in sorted(reported - titles.keys())}
    figures = []
    if metric:
        words = f"validation accuracy (%), {plain_metric(metric)}"
        figures += _curve(runs, words, [run.validation_series(metric) for run in runs])
    for key, words in titles.items():
        figures += _curve(runs, words, [run.client_series(key) for run in runs])
    for key, words in SERVER_METRICS.items():
        series = [run.server_series(key) for run in runs]
        figures += _curve(runs, words, [{"": points} if points else {} for points in series])
    if not figures:
        return Section("rounds", "Round by round", "No round has been finished yet.")
    intro = "Lines are means over clients; bands reach from the lowest to the highest client."
    if len(runs) == 1:
        intro += " Thin lines are single clients."
    intro += _shown(MAX_CURVES, len(figures), "metrics are drawn; events.jsonl has all")
    return Section("rounds", "Round by round", intro, [*legend(runs), Figures(figures[:MAX_CURVES])])


def _curve(runs: Sequence[ReportedRun], title: str, everyone: Sequence[Series]) -> list[Figure]:
    lines = []
    for run, series in zip(runs, everyone, strict=True):
        by_round: dict[int, list[float]] = {}
        for points in series.values():
            for round_number, value in points:
                by_round.setdefault(round_number, []).append(value)
        if not any(value for values in by_round.values() for value in values):
            continue  # a term that the method does not have is always zero
        if len(runs) == 1 and 1 < len(series) <= 12:
            lines += [charts.Line(f"{run.style} thin", [(r, v, "") for r, v in points]) for points in series.values()]
        ordered = sorted(by_round.items())
        middle = [
            (r, mean(v), f"{run.label}, round {r}: {mean(v):.3g} ({min(v):.3g} to {max(v):.3g})") for r, v in ordered
        ]
        lines.append(charts.Line(run.style, middle, [(r, min(v), max(v)) for r, v in ordered]))
    span = (0, max(1, *(run.rounds_done for run in runs)))  # the same for all curves
    drawing = charts.line_chart(lines, "round", f"{title} over the rounds", span=span)
    return [Figure(title, drawing)] if drawing else []


# --- helpers ---------------------------------------------------------------------------------------


def _baseline(runs: Sequence[ReportedRun]) -> tuple[Mapping[str, Mapping[str, float]], str]:
    """Return what to compare with, and its name: the scores of the first run, or of the untrained encoders."""
    if len(runs) == 1:
        return runs[-1].untrained, "untrained"
    first = runs[0].result
    scores = {name: scores for name, scores in first.results["clients"].items() if name not in first.never_trained}
    return scores, runs[0].label


def _split(runs: Sequence[ReportedRun]) -> str:
    return "test" if all(run.folder.finished for run in runs) else "validation"


def _shown(limit: int, count: int, words: str) -> str:
    """Return a sentence if not everything is shown."""
    return f" The first {limit} of {count} {words}." if count > limit else ""


def _column(scores: Mapping[str, Mapping[str, float]], metric: str) -> list[float]:
    return [values[metric] for values in scores.values() if metric in values]


def _percent(values: list[float]) -> str:
    return f"{mean(values):.1f} %" if values else "-"

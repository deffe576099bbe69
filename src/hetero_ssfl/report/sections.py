"""The sections about results: the runs, accuracy, and curves over the rounds."""

from collections.abc import Collection, Sequence
from itertools import chain
from statistics import mean
from typing import NamedTuple

from ..runs.events import ClientTrained
from . import tables
from .blocks import TEXT, Block, Figure, Figures, Folded, Rows, Section
from .plots import Line, dot_chart, holdings_chart, line_chart, mean_line
from .reported_run import MAX_ROWS, UNTRAINED, ReportedRun, Series, legend
from .tables import number, of_metric, spread

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
METRIC_PARTS = {
    "linear": "linear probe",
    "knn": "nearest neighbours",
    "knn-flat": "nearest neighbours, flattened",
    "finetune": "fine-tuned",
    "all": "all classes",
    "own": "own classes",
}


class Column(NamedTuple):
    """The accuracies of a run, or of the untrained encoders."""

    style: str
    label: str
    scores: dict[str, float]  # of every client
    trained: dict[str, float]  # of those that trained, whose mean counts


def columns_of(runs: Sequence[ReportedRun], metric: str | None) -> list[Column]:
    """Return the untrained encoders and each run; nothing without a metric."""
    if metric is None:
        return []
    untrained = of_metric(runs[-1].untrained, metric)
    of_runs = [(run, of_metric(run.results["clients"], metric)) for run in runs]
    columns = [Column(run.style, run.label, scores, run.trained_scores(metric)) for run, scores in of_runs]
    return [Column(UNTRAINED, "untrained", untrained, untrained), *columns]


def _baseline(columns: Sequence[Column]) -> Column:
    """Return what the last run is compared with: the first run, or the untrained encoders if there is no other."""
    return columns[1 if len(columns) > 2 else 0]


def _gains(column: Column, base: Column) -> dict[str, float]:
    """Return the difference to the baseline of each client that trained."""
    return {client: score - base.trained[client] for client, score in column.trained.items() if client in base.trained}


def _percent(values: Collection[float]) -> str:
    return f"{mean(values):.1f} %" if values else "-"


def _split(runs: Sequence[ReportedRun]) -> str:
    return "test" if all(run.folder.finished for run in runs) else "validation"


def _shown(limit: int, count: int, words: str) -> str:
    """Return a sentence if not everything is shown."""
    return f" The first {limit} of {count} {words}." if count > limit else ""


def plain_metric(metric: str) -> str:
    return ", ".join(METRIC_PARTS.get(part, part) for part in metric.split("_"))


# --- the top of the page ---------------------------------------------------------------------------


def summary(runs: Sequence[ReportedRun], metric: str | None) -> Rows:
    facts = [_facts(run) for run in runs]
    columns = columns_of(runs, metric)
    for run, about, column in zip(runs, facts, columns[1:], strict=False):
        of_what = f"{plain_metric(str(metric))}, {_split(runs)} {run.things}"
        about["mean accuracy"], base = f"{_percent(column.trained.values())} ({of_what})", _baseline(columns)
        if (gains := _gains(column, base)) and column is not base:
            better = f"higher for {sum(gain > 0 for gain in gains.values())} of {len(gains)} clients"
            about[f"difference to {base.label}"] = f"{mean(gains.values()):+.1f}, {better}"
    rows = [[key, *[about.get(key, "-") for about in facts]] for key in dict.fromkeys(key for f in facts for key in f)]
    return Rows("The runs of this page", ["", *[run.label for run in runs]], rows, TEXT)


def _facts(run: ReportedRun) -> dict[str, str]:
    simulated = run.facts["site"] == "simulated"
    data = f"images of {tables.without_folders(run.config.data.source)}" if simulated else f"{run.things} of their own"
    labels = "" if run.method is None else "labeled " if run.method.needs_labels else "unlabeled "
    facts = {
        "method": run.config.method,
        "clients": str(len(run.clients)),
        "different encoders": str(len({run.encoder(client) for client in run.clients} - {""}) or "-"),
        "trained on": labels + data,
        "rounds done": f"{run.rounds_done} of {run.config.rounds}",
        "seed": str(run.config.seed),
    }
    if left_out := sum(what == "left out" for _, _, what, _ in run.faults()):
        facts["replies left out"] = str(left_out)
    if run.never_trained:
        facts["clients that never trained"] = f"{len(run.never_trained)} of {len(run.results['clients'])}"
    return {**facts, "mean accuracy": "unknown: the data have no labels, or the run has not been evaluated"}


def key_metrics(runs: Sequence[ReportedRun], metric: str | None) -> list[tuple[str, str, str]]:
    """Return (style, value, description) for the cards at the top."""
    cards, last = [], runs[-1]
    if metric:
        untrained, *columns = columns_of(runs, metric)
        floors = {floor: scores for floor in last.floors if (scores := last.scores(metric, floor))}
        best = sorted(floors, key=lambda floor: mean(floors[floor]))[-1:]
        cards += [(UNTRAINED, _percent(untrained.trained.values()), untrained.label)] if last.untrained else []
        cards += [(UNTRAINED, _percent(floors[floor]), f"floor: {floor}") for floor in best]
        cards += [(column.style, _percent(column.trained.values()), column.label) for column in columns[-5:]]
    sent = sum(sum(last.bytes_of(key).values()) for key in ("bytes_up", "bytes_down"))
    cards.append(("", tables.volume(sent), f"sent in total, up and down, {last.label}"))
    return [*cards, ("", tables.duration(last.seconds), f"in rounds, {last.label}")]


# --- accuracy --------------------------------------------------------------------------------------


def accuracy(runs: Sequence[ReportedRun], metric: str | None) -> Section:
    title, last, holdings = "Accuracy and classes of each client", runs[-1], _holdings(runs)
    if metric is None:
        intro = "There are no accuracies: the data have no labels, or the run has not been evaluated."
        return Section("accuracy", title, intro, [Figures(holdings, "large")] if holdings else [])
    columns, names = columns_of(runs, metric), tables.metric_names(last)
    clients = [c for c in last.clients if any(c in column.scores for column in columns[1:])]
    labels_per_class = last.config.evaluation.labels_per_class
    given = f" with {labels_per_class} labels per class" if labels_per_class else ""
    intro = f"On {_split(runs)} {last.things}; {plain_metric(metric)}, on the frozen encoder{given}."
    intro += _shown(MAX_DRAWN, len(clients), "clients are drawn")
    if not holdings:
        intro += " The classes of the clients are not known: participants brought their own data."
    blocks: list[Block] = [
        *legend(runs, bool(last.untrained)),
        Figures([_accuracy_of_clients(last, columns, clients, metric), *holdings], "large"),
        _accuracy_table(runs, columns, clients, metric),
    ]
    if floors := last.floors:
        cells = [[floor, *[spread(last.scores(m, floor)) for m in names]] for floor in floors]
        caption = "Floors: the same probes on features that nobody trained, percent"
        blocks.append(Rows(caption, ["features", *map(plain_metric, names)], cells))
    if others := [name for name in names if name != metric]:
        rows = [[plain_metric(m), *[spread(c.trained.values()) for c in columns_of(runs, m)]] for m in others]
        head = ["probe", *[column.label for column in columns]]
        blocks.append(Folded("Other probes", [Rows("Mean ± deviation over clients, percent", head, rows)]))
    if len({run.settings for run in runs}) < len(runs):  # some runs differ only in the seed
        caption = "Over seeds: difference to the first on equal seeds, paired by client"
        rows = tables.compare_cells([*tables.floor_rows(runs, metric), *tables.compare_rows(runs, metric)])
        blocks.append(Rows(caption, tables.COMPARED, rows))
    return Section("accuracy", title, intro, blocks)


def _accuracy_of_clients(run: ReportedRun, columns: list[Column], clients: list[str], metric: str) -> Figure:
    title, rows = "Accuracy, client by client", []
    for client in clients[:MAX_DRAWN]:
        scores = [(c, c.scores[client]) for c in columns if client in c.scores]
        rows.append((run.name(client), [(c.style, v, f"{client}, {c.label}: {v:.1f}") for c, v in scores]))
    means = [(c, mean(c.trained.values())) for c in columns if c.trained]
    rows.append(("mean over clients", [(c.style, v, f"mean, {c.label}: {v:.1f}") for c, v in means]))
    x_label = f"accuracy (%), {plain_metric(metric)}"
    return Figure(title, dot_chart(rows, x_label, title))


def _holdings(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Draw how many images of each class each client has; one figure per distinct division of the data."""
    divided = {str(run.facts["holdings"]): run for run in reversed(runs) if run.facts.get("holdings")}
    figures = []
    for run in divided.values():
        counts, classes = run.facts["holdings"], list(run.facts.get("classes", []))
        name = f"{run.things.capitalize()} of each class" + (f", {run.label}" if len(divided) > 1 else "")
        note = f"{sum(map(sum, counts.values())):,} {run.things}; the area of a circle is their number."
        note += _shown(MAX_DRAWN, len(counts), "clients are drawn")
        if all(other.method and not other.method.needs_labels for other in runs):
            note += " Labels are used only to divide the data: no loss uses them."
        shown = dict(sorted(counts.items())[:MAX_DRAWN])
        figures.append(Figure(name, holdings_chart(shown, classes, run.style, name), note))
    return figures


def _accuracy_table(runs: Sequence[ReportedRun], columns: list[Column], clients: list[str], metric: str) -> Rows:
    last, base, rows = runs[-1], _baseline(columns), []
    gains = _gains(columns[-1], base)
    for client in clients[:MAX_ROWS]:
        parameters = last.models[client].get("parameters")
        row = [
            last.row_name(client),
            *[number(column.scores.get(client)) for column in columns],
            number(gains.get(client), "+"),
            f"{parameters:,}" if isinstance(parameters, int) else "-",
            last.holdings(client) or "-",
            last.encoder(client) or "-",
        ]
        rows.append(row)
    means = [spread(column.trained.values()) for column in columns]
    foot = [["mean ± sd", *means, number(mean(gains.values()) if gains else None, "+"), "", "", ""]]
    shared = [run.results.get("global", {}).get(metric) for run in runs]
    if any(value is not None for value in shared):
        foot.append(["global model", "", *map(number, shared), "", "", "", ""])
    labels = [column.label for column in columns]
    head = ["client", *labels, f"difference to {base.label}", "parameters", "classes", "encoder"]
    caption = f"Accuracy in percent, {plain_metric(metric)}." + _shown(MAX_ROWS, len(clients), "clients are listed")
    return Rows(caption, head, rows, range(1, len(runs) + 4), foot)


# --- over the rounds -------------------------------------------------------------------------------


def curves(runs: Sequence[ReportedRun], metric: str | None) -> Section:
    titles = {key: words.format(things=runs[-1].things) for key, words in CLIENT_METRICS.items()}
    reported = {key for run in runs for event in run.events_of(ClientTrained) for key in event.figures}
    titles |= {key: key.replace("_", " ") for key in sorted(reported - titles.keys())}
    series = [(words, [run.client_series(key) for run in runs]) for key, words in titles.items()]
    series += [(words, [{"": run.server_series(key)} for run in runs]) for key, words in SERVER_METRICS.items()]
    series += [("learned weight in the consensus", [run.weight_series() for run in runs])]
    if metric:
        words = f"validation accuracy (%), {plain_metric(metric)}"
        series = [(words, [run.validation_series(metric) for run in runs]), *series]
    figures = [figure for words, everyone in series if (figure := curve(runs, words, everyone)).drawing]
    if not figures:
        return Section("rounds", "Round by round", "No round has been finished yet.")
    intro = "Lines are means over clients; bands reach from the lowest to the highest client."
    if len(runs) == 1:
        intro += " Thin lines are single clients."
    intro += _shown(MAX_CURVES, len(figures), "metrics are drawn; events.jsonl has all")
    return Section("rounds", "Round by round", intro, [*legend(runs), Figures(figures[:MAX_CURVES])])


def curve(runs: Sequence[ReportedRun], title: str, everyone: Sequence[Series]) -> Figure:
    lines = []
    for run, series in zip(runs, everyone, strict=True):
        by_round: dict[int, list[float]] = {}
        for number_of_round, value in chain(*series.values()):
            by_round.setdefault(number_of_round, []).append(value)
        if not any(chain(*by_round.values())):
            continue  # a term that the method does not have is always zero
        if len(runs) == 1 and 1 < len(series) <= 12:
            thin = {"linewidth": 1, "alpha": 0.4}
            for client, points in sorted(series.items()):
                named = [(r, v, f"{client}, round {r}: {v:.3g}" if r == points[-1][0] else "") for r, v in points]
                lines.append(Line(run.style, named, look=thin, name=client))
        lines.append(mean_line(run.style, run.label, sorted(by_round.items())))
    return Figure(title, line_chart(lines, "round", f"{title} over the rounds"))

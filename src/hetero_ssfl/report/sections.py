"""The sections about what was learned. Where a run lacks something, a section says so in a sentence."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from . import svg
from .arms import Arm, without_folders
from .blocks import Block, Figure, Figures, Folded, Rows, Section
from .phrases import METHODS, MOST_ROWS, UNTRAINED, bytes_of, legend, metric_words, names_of, probed_on, volume
from .status import duration
from .tables import Result, compare_rows, metric_names, spread

MOST_DRAWN = 30
MOST_CURVES = 12
FIGURES = {
    "loss_ssl": "loss on its own {things}",
    "loss_alignment": "alignment loss, 0 is agreement with all",
    "effective_rank": "effective rank of a client's kernel",
    "spread": "feature spread, 0 is collapse",
    "batch_rank": "effective rank within a batch",
    "drift": "how far a client moved",
}
SERVER_FIGURES = {"consensus_effective_rank": "effective rank of the consensus"}


# --- the top of the page ---------------------------------------------------------------------------


def summary(arms: Sequence[Arm], metric: str | None) -> list[str]:
    """What ran, on what, and the result."""
    last = arms[-1]
    config = last.result.config
    encoders = {last.encoder(client) for client in last.clients} - {""}
    who = _count(len(last.clients), "client")
    who += f" with {len(encoders)} different encoders" if len(encoders) > 1 else " with the same encoder"
    data = f"images of {without_folders(config.data.source)}"
    if last.given or not last.folder.simulated:
        data = f"{last.things} of their own"
    seeds = ", ".join(map(str, sorted({arm.result.config.seed for arm in arms})))
    span = f"{_count(config.rounds, 'round')}, seed {seeds}"
    if len(arms) == 1:
        how = METHODS.get(config.method, f"trained with {config.method}").format(
            rad=config.rad.size, things=last.things
        )
        labels = {True: "labeled ", False: "unlabeled ", None: ""}[last.reads_labels]
        sentences = [f"{who} {how}. They trained on {labels}{data} for {span}."]
    else:
        runs = ", ".join(f"{arm.label} ({arm.result.config.method})" for arm in arms)
        sentences = [f"{_count(len(arms), 'run')} are compared: {runs}. {who}, {data}, {span}."]
    sentences += _outcome(arms, metric)
    for arm in arms:
        if not arm.finished:
            sentences.append(
                f"{arm.label} is not finished: {arm.rounds_done} of {_count(arm.result.config.rounds, 'round')} done."
            )
    lost = sum(what == "left out" for arm in arms for _, _, what, _ in arm.faults())
    if lost:
        sentences.append(f"{_count(lost, 'reply', 'replies')} {'was' if lost == 1 else 'were'} left out: see Faults.")
    return sentences


def _outcome(arms: Sequence[Arm], metric: str | None) -> list[str]:
    if metric is None:
        return ["There are no labels to probe with, so there are no accuracies."]
    last, base = arms[-1].result, _baseline(arms)
    scores = last.scores(metric)
    if not scores:
        return []
    words = f"With {arms[-1].label} the" if len(arms) > 1 else "The"
    words += f" mean accuracy is {mean(scores):.1f} % on {probed_on(arms)} ({metric_words(metric)})"
    pairs = [(last.score(c, metric), base.get(c, {}).get(metric)) for c in last.results["clients"]]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return [words + "."]
    gain, start = mean(a - b for a, b in known), mean(b for _, b in known)
    than = "untrained" if len(arms) == 1 else arms[0].label
    side, better = "below" if gain < 0 else "above", sum(a > b for a, b in known)
    words += f", {abs(gain):.1f} points {side} {than} ({start:.1f} %)"
    return [f"{words}; better for {better} of {_count(len(known), 'client')}."]


def key_figures(arms: Sequence[Arm], metric: str | None) -> list[tuple[str, str, str]]:
    """(style, figure, what it is) for the cards under the summary."""
    cards = []
    if metric:
        if arms[-1].untrained:
            cards.append((UNTRAINED, _percent(_column(arms[-1].untrained, metric)), "untrained"))
        for arm, name in list(zip(arms, names_of(arms), strict=True))[-5:]:
            cards.append((arm.style, _percent(arm.result.scores(metric)), name))
    last = arms[-1]
    up, down = (sum(bytes_of(last, key).values()) for key in ("bytes_up", "bytes_down"))
    cards.append(("", volume(up + down), "sent in all, both ways" + (f", {last.label}" if len(arms) > 1 else "")))
    seconds = sum(value for _, value in last.server_series("seconds"))
    return [*cards, ("", duration(seconds), "in rounds" + (f", {last.label}" if len(arms) > 1 else ""))]


# --- accuracy --------------------------------------------------------------------------------------


def accuracy(arms: Sequence[Arm], metric: str | None) -> Section:
    title = "Each client: accuracy, and the classes it holds"
    held = _holdings(arms)
    if metric is None:
        reason = "Nothing to probe: the data have no labels, or the run has not been evaluated."
        blocks: list[Block] = [Figures(held, "large")] if held else []
        return Section(
            "accuracy", title, reason if held else f"{reason} Nor is it known who holds which classes.", blocks
        )
    last, base = arms[-1], _baseline(arms)
    clients = [c for c in last.clients if any(arm.result.score(c, metric) is not None for arm in arms)]
    marks = {client: _marks(arms, client, metric) for client in clients}
    averages = [(UNTRAINED, _column(last.untrained, metric), "untrained")] if last.untrained else []
    averages += [(arm.style, arm.result.scores(metric), arm.label) for arm in arms]
    means = [(style, mean(values), f"mean, {label}: {mean(values):.1f}") for style, values, label in averages if values]
    drawn = [(last.name(client), marks[client]) for client in clients[:MOST_DRAWN]]
    words = f"accuracy (%), {metric_words(metric)}"
    label = f"Accuracy of each client. {'; '.join(text for _, _, text in means)}."
    drawing = svg.dot_plot([*drawn, ("mean over clients", means)], words, label)
    evaluation = last.result.config.evaluation
    given = f" with {evaluation.labels_per_class} labels per class" if evaluation.labels_per_class else ""
    intro = f"On {probed_on(arms)} of every class; {metric_words(metric)}, on the frozen encoder{given}."
    if len(clients) > MOST_DRAWN:
        intro += f" The first {MOST_DRAWN} of {len(clients)} clients are drawn."
    if not held:
        intro += " Who holds which classes is not known here: participants brought their own data."
    blocks = [
        *legend(arms, bool(last.untrained)),
        Figures([Figure("Accuracy, client by client", drawing), *held], "large"),
        _accuracy_table(arms, clients, base, metric),
    ]
    others = [name for name in metric_names(last.result) if name != metric]
    if others:
        blocks.append(Folded("Other probes", [_other_probes(arms, others)]))
    blocks += _over_seeds(arms, metric)
    return Section("accuracy", title, intro, blocks)


def _holdings(arms: Sequence[Arm]) -> list[Figure]:
    """Who holds how many images of which class; more than one figure only where runs were divided differently."""
    divided: dict[str, Arm] = {}
    for arm in reversed(arms):
        if arm.result.facts.get("holdings"):
            divided.setdefault(str(arm.result.facts["holdings"]), arm)
    figures = []
    for arm in divided.values():
        counts, classes = arm.result.facts["holdings"], list(arm.result.facts.get("classes", []))
        drawn = list(counts.items())[:MOST_DRAWN]
        title = f"{arm.things.capitalize()} of each class"
        label = f"{title} at each client. " + "; ".join(
            f"{client}: {arm.result.holdings(client)}" for client in list(counts)[:12]
        )
        total = f"{sum(map(sum, counts.values())):,} {arm.things} at {_count(len(counts), 'client')}"
        note = f"{total}; a circle's area is their number."
        if len(counts) > MOST_DRAWN:
            note += f" The first {MOST_DRAWN} clients are drawn."
        if all(a.reads_labels is False for a in arms):
            note += " Labels only divide the clients: no loss reads them."
        name = title + (f", {arm.label}" if len(divided) > 1 else "")
        figures.append(Figure(name, svg.bubbles(drawn, classes, arm.style, label), note))
    return figures


def _marks(arms: Sequence[Arm], client: str, metric: str) -> list[tuple[str, float, str]]:
    start = arms[-1].untrained.get(client, {}).get(metric)
    marks = [] if start is None else [(UNTRAINED, start, f"{client}, untrained: {start:.1f}")]
    for arm in arms:
        value = arm.result.score(client, metric)
        if value is not None:
            marks.append((arm.style, value, f"{client}, {arm.label}: {value:.1f}"))
    return marks


def _accuracy_table(arms: Sequence[Arm], clients: list[str], base: Mapping[str, Any], metric: str) -> Rows:
    last = arms[-1]
    rows = []
    for client in clients[:MOST_ROWS]:
        score, start = last.result.score(client, metric), base.get(client, {}).get(metric)
        parameters = last.models[client].get("parameters")
        row = [
            client,
            _figure(last.untrained.get(client, {}).get(metric)),
            *[_figure(arm.result.score(client, metric)) for arm in arms],
            "-" if score is None or start is None else f"{score - start:+.1f}",
            f"{parameters:,}" if isinstance(parameters, int) else "-",
            last.result.holdings(client) or "-",
            last.encoder(client) or "-",
        ]
        rows.append(row)
    columns = [_column(last.untrained, metric), *[arm.result.scores(metric) for arm in arms]]
    gains = [float(row[-4]) for row in rows if row[-4] != "-"]
    foot = [["mean ± sd", *map(spread, columns), f"{mean(gains):+.1f}" if gains else "-", "", "", ""]]
    for arm in arms:
        shared = arm.result.results.get("global", {}).get(metric)
        if shared is not None:
            others = ["" for _ in arms]
            others[list(arms).index(arm)] = _figure(shared)
            foot.append(["one model for all", "", *others, "", "", "", ""])
    than = "difference to " + ("untrained" if len(arms) == 1 else arms[0].label)
    head = ["client", "untrained", *names_of(arms), than, "parameters", "holds", "encoder"]
    more = f"; the first {MOST_ROWS} of {len(clients)}" if len(clients) > MOST_ROWS else ""
    return Rows(f"Accuracy in percent, {metric_words(metric)}{more}", head, rows, range(1, len(arms) + 4), foot)


def _other_probes(arms: Sequence[Arm], metrics: Sequence[str]) -> Rows:
    rows = [
        [
            metric_words(metric),
            spread(_column(arms[-1].untrained, metric)),
            *[spread(a.result.scores(metric)) for a in arms],
        ]
        for metric in metrics
    ]
    return Rows("Mean ± deviation over clients, percent", ["probe", "untrained", *names_of(arms)], rows)


def _over_seeds(arms: Sequence[Arm], metric: str) -> list[Block]:
    """Only where runs are repetitions of one another."""
    results: list[Result] = [arm.result for arm in arms]
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


def curves(arms: Sequence[Arm], metric: str | None) -> Section:
    figures = []
    if metric:
        figures += _curve(arms, f"validation:{metric}", f"validation accuracy (%), {metric_words(metric)}")
    reported = sorted({key for arm in arms for key in arm.client_figures}, key=lambda k: ([*FIGURES, k].index(k), k))
    for key in reported:
        words = FIGURES[key].format(things=arms[-1].things) if key in FIGURES else key.replace("_", " ")
        figures += _curve(arms, key, words)
    for key, words in SERVER_FIGURES.items():
        points = [[(r, v, f"{arm.label}, round {r}: {v:.3g}") for r, v in arm.server_series(key)] for arm in arms]
        lines = [svg.Line(arm.style, found) for arm, found in zip(arms, points, strict=True) if found]
        if lines:
            figures.append(Figure(words, svg.line_chart(lines, "round", f"{words} over the rounds", span=_span(arms))))
    if not figures:
        return Section("rounds", "Round by round", "No round has been finished yet.")
    intro = "The line is the mean over clients, the band reaches from the lowest client to the highest."
    if len(arms) == 1:
        intro += " Thin lines are single clients."
    if len(figures) > MOST_CURVES:
        intro += f" The first {MOST_CURVES} of {len(figures)} figures are drawn; events.jsonl has all."
    return Section("rounds", "Round by round", intro, [*legend(arms), Figures(figures[:MOST_CURVES])])


def _span(arms: Sequence[Arm]) -> tuple[int, int]:
    """The same rounds under every curve."""
    return 0, max(1, *(arm.rounds_done for arm in arms))


def _curve(arms: Sequence[Arm], key: str, title: str) -> list[Figure]:
    lines, ends = [], []
    for arm in arms:
        series = arm.series(key)
        by_round: dict[int, list[float]] = {}
        for points in series.values():
            for number, value in points:
                by_round.setdefault(number, []).append(value)
        if not any(value for values in by_round.values() for value in values):
            continue  # a term that a method does not have is zero throughout
        if len(arms) == 1 and 1 < len(series) <= 12:
            lines += [svg.Line(f"{arm.style} thin", [(r, v, "") for r, v in points]) for points in series.values()]
        ordered = sorted(by_round.items())
        middle = [
            (r, mean(v), f"{arm.label}, round {r}: {mean(v):.3g} ({min(v):.3g} to {max(v):.3g})") for r, v in ordered
        ]
        lines.append(svg.Line(arm.style, middle, [(r, min(v), max(v)) for r, v in ordered]))
        ends.append(f"{arm.label} from {middle[0][1]:.3g} to {middle[-1][1]:.3g}")
    drawing = svg.line_chart(lines, "round", f"{title} over the rounds: {'; '.join(ends)}.", span=_span(arms))
    return [Figure(title, drawing)] if drawing else []


# --- small things ----------------------------------------------------------------------------------


def _baseline(arms: Sequence[Arm]) -> Mapping[str, Mapping[str, float]]:
    """What the last run is held against: the first one, or with one run its untrained encoders."""
    return arms[-1].untrained if len(arms) == 1 else arms[0].result.results["clients"]


def _column(scores: Mapping[str, Mapping[str, float]], metric: str) -> list[float]:
    return [values[metric] for values in scores.values() if metric in values]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(values: list[float]) -> str:
    return f"{mean(values):.1f} %" if values else "-"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"

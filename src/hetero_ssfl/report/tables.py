"""Tables of results and of differences between runs."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from ..config import Config, EngineConfig, TrackingConfig, WatchConfig
from ..errors import RunError
from ..runs.events import Evaluated
from ..runs.folder import RunFolder


@dataclass(frozen=True)
class Result:
    """A finished run: its config, facts and accuracies on the test images."""

    folder: RunFolder
    config: Config
    facts: dict[str, Any]
    results: dict[str, Any]

    @classmethod
    def read(cls, folder: RunFolder) -> "Result":
        return cls(folder, folder.read_config(), folder.read_json("facts.json"), folder.read_json("results.json"))

    @property
    def title(self) -> str:
        extra = " + RAD images" if self.config.rad.in_ssl else ""
        return f"{self.config.name} / {self.config.method}{extra}"

    @property
    def settings(self) -> Config:
        """The config without seed, engine and who looks on; equal for runs that are repetitions of each other."""
        outside = {"engine": EngineConfig(), "tracking": TrackingConfig(), "watch": WatchConfig()}
        return self.config.model_copy(update={"seed": 0, **outside})

    @property
    def never_trained(self) -> list[str]:
        """Clients that no round selected, or whose replies were all excluded. They are left out of means."""
        return self.results.get("never_trained", [])

    @property
    def floors(self) -> list[str]:
        return list(self.results.get("floors", {}))

    def score(self, client: str, metric: str) -> float | None:
        return self.results["clients"].get(client, {}).get(metric)

    def trained_scores(self, metric: str, floor: str | None = None) -> dict[str, float]:
        """Return the score of each client that trained, or that of a floor at the width of its encoder."""
        clients = self.results.get("floors", {}).get(floor, {}) if floor else self.results["clients"]
        return {c: score for c, score in of_metric(clients, metric).items() if c not in self.never_trained}

    def scores(self, metric: str, floor: str | None = None) -> list[float]:
        return list(self.trained_scores(metric, floor).values())

    def row_name(self, client: str) -> str:
        return f"{client} (never trained)" if client in self.never_trained else client

    def model(self, client: str) -> dict[str, Any]:
        return self.results.get("models", {}).get(client, {"encoder": "-"})

    def holdings(self, client: str) -> str:
        counts = self.facts.get("holdings", {}).get(client, [])
        names = [name for name, count in zip(self.facts.get("classes", []), counts, strict=False) if count]
        return ", ".join(names) if len(names) <= 4 else f"{len(names)} classes"


def metric_names(result: Result) -> list[str]:
    return sorted({name for scores in result.results["clients"].values() for name in scores})


def of_metric(clients: Mapping[str, Mapping[str, float]], metric: str) -> dict[str, float]:
    """Return the score of each client that has the metric."""
    return {client: scores[metric] for client, scores in clients.items() if metric in scores}


def table_of(
    title: str, head: Sequence[str], *parts: Iterable[Sequence[str]], texts: int = 1, caption: str | None = None
) -> Table:
    """Return a table of rows, with a line between its parts. The first columns hold texts, the others numbers."""
    table = Table(title=title, caption=caption)
    for place, heading in enumerate(head):
        table.add_column(heading, justify="left" if place < texts else "right")
    for part in parts:
        table.add_section()
        for row in part:
            table.add_row(*row)
    return table


def results_table(result: Result) -> Table:
    """Return a table with a row per client, a column per metric, and mean and deviation over clients below."""
    metrics, clients = metric_names(result), result.results["clients"]
    floors = [[f, "nobody trained these", "", *[spread(result.scores(m, f)) for m in metrics]] for f in result.floors]
    rows = []
    for client in clients:
        scores = [number(result.score(client, metric)) for metric in metrics]
        encoder = escape(result.model(client)["encoder"])
        rows.append([result.row_name(client), encoder, result.holdings(client), *scores])
    trained = len(clients) - len(result.never_trained)
    over = f"over the {trained} clients that trained" if result.never_trained else "over clients"
    means = [["mean ± sd", over, "", *[spread(result.scores(metric)) for metric in metrics]]]
    if untrained := result.results["untrained"]:
        cells = [spread(of_metric(untrained, metric).values()) for metric in metrics]
        means.append(["untrained", "the same encoders", "", *cells])
    title = f"{result.title}, seed {result.config.seed}: accuracy on test images (%)"
    head = ["client", "encoder", "holds", *[metric.replace("_", ", ") for metric in metrics]]
    return table_of(title, head, floors, rows, means, texts=3)


def check_comparable(results: Sequence[Result]) -> None:
    """Raise RunError for runs without accuracies, or on different data: their accuracies say nothing to each other."""
    for folder in (result.folder for result in results if not metric_names(result)):
        raise RunError(f"'{folder.path}' has no accuracies, because its data have no labels. Use hetero-ssfl report.")
    first = results[0]
    for other in results[1:]:
        sources = [r.config.data.source for r in (first, other)]
        shapes = [r.config.data.model_copy(update={"limit": None}) for r in (first, other)]
        pixels = [r.facts.get("checksums", {}).get("test") for r in (first, other)]
        same_classes = first.facts.get("classes") == other.facts.get("classes")
        if sources[0] != sources[1] or not same_classes or (shapes[0] == shapes[1] and pixels[0] != pixels[1]):
            raise RunError(
                f"'{first.folder.path}' and '{other.folder.path}' were trained on different data ('{sources[0]}' and "
                f"'{sources[1]}'). List runs on the same data."
            )


def compare_rows(results: Sequence[Result], metric: str) -> list[dict[str, Any]]:
    """Group runs by equal settings: mean over clients for each seed, then mean and deviation over seeds."""
    groups: dict[Config, list[Result]] = defaultdict(list)
    for result in results:
        if any(result.config.seed == other.config.seed for other in groups[result.settings]):
            raise RunError(
                f"'{result.folder.path}' has the same settings and seed as another run in the list. List each run once."
            )
        groups[result.settings].append(result)
    labels = [members[0].title for members in groups.values()]
    rows: list[dict[str, Any]] = []
    for label, members in zip(labels, groups.values(), strict=True):
        same = labels.count(label) > 1  # same name and method, different settings: add the folder's name
        name = f"{label} ({members[0].folder.path.name})" if same else label
        row = _row(name, metric, {r.config.seed: r.scores(metric) for r in members})
        per_seed = row["per_seed"]
        first = rows[0]["per_seed"] if rows else per_seed
        if per_seed:
            row["sd_over_clients"] = mean(_sd(r.scores(metric)) for r in members)
        if shared := [seed for seed in per_seed if seed in first]:
            row["difference_to_first"] = mean(per_seed[seed] - first[seed] for seed in shared)
        row["interval"] = paired_interval(next(iter(groups.values())), members, metric)
        rows.append(row)
    return rows


def floor_rows(results: Sequence[Result], metric: str) -> list[dict[str, Any]]:
    """Return rows like those of `compare_rows` for features that nobody trained, over all runs and seeds."""
    rows = []
    for floor in dict.fromkeys(floor for result in results for floor in result.floors):
        by_seed: dict[int, list[float]] = defaultdict(list)
        for result in results:
            by_seed[result.config.seed] += result.scores(metric, floor)
        rows.append(_row(floor, metric, by_seed))
    return [row for row in rows if row["per_seed"]]


def _row(name: str, metric: str, by_seed: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    per_seed = {seed: mean(scores) for seed, scores in by_seed.items() if scores}
    values = list(per_seed.values())
    return {
        "run": name,
        "seeds": sorted(per_seed),
        "metric": metric,
        "mean": mean(values) if values else None,
        "sd_over_seeds": stdev(values) if len(values) > 1 else None,
        "sd_over_clients": None,
        "per_seed": per_seed,
        "difference_to_first": None,
        "interval": None,
    }


# The 97.5 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def student(seeds: int) -> float:
    """Return the quantile for an interval around the mean of `seeds` values."""
    return STUDENT[min(seeds - 1, len(STUDENT)) - 1]


def interval95(values: Sequence[float]) -> list[float] | None:
    """Return the 95 % interval of the mean: mean ± t s / sqrt(n). It is wide for 2 or 3 seeds, and says so."""
    if len(values) < 2:
        return None
    half = student(len(values)) * stdev(values) / len(values) ** 0.5
    return [mean(values) - half, mean(values) + half]


def paired_interval(first: Sequence[Result], second: Sequence[Result], metric: str) -> list[float] | None:
    """Return the 95 % bootstrap interval of the mean difference (second - first) per client and seed."""
    by_seed = {run.config.seed: run.trained_scores(metric) for run in first}
    differences = []
    for run in second:
        before, after = by_seed.get(run.config.seed, {}), run.trained_scores(metric)
        differences.append([after[client] - before[client] for client in after if client in before])
    return bootstrap_interval([of_seed for of_seed in differences if of_seed])


def bootstrap_interval(differences: list[list[float]]) -> list[float] | None:
    """Return the 95 % interval of the mean of differences, which are given as one list of clients per seed.

    Seeds are drawn first, then clients within each seed, because clients of one run are not independent.
    """
    if not differences:
        return None
    rng, clients, means = np.random.default_rng(0), [np.array(values) for values in differences], []
    for _ in range(4000):
        drawn = [clients[seed] for seed in rng.integers(len(clients), size=len(clients))]
        of_seeds = [values[rng.integers(len(values), size=len(values))].sum() / len(values) for values in drawn]
        means.append(sum(of_seeds) / len(clients))
    return [float(value) for value in np.quantile(means, [0.025, 0.975])]


COMPARED = ("run", "seeds", "mean", "sd over seeds", "sd over clients", "difference", "95 % interval")


def compare_cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            row["run"],
            ", ".join(map(str, row["seeds"])),
            *[number(row[key]) for key in ("mean", "sd_over_seeds", "sd_over_clients")],
            number(row["difference_to_first"], "+"),
            "-" if row["interval"] is None else "{:+.1f} to {:+.1f}".format(*row["interval"]),
        ]
        for row in rows
    ]


def compare_table(rows: list[dict[str, Any]], floors: list[dict[str, Any]]) -> Table:
    metric = rows[0]["metric"].replace("_", ", ")
    title = f"test accuracy (%), {metric}; difference to the first on equal seeds"
    return table_of(title, COMPARED, compare_cells(floors), compare_cells(rows))


def round_curves(results: Sequence[Result], metric: str) -> list[dict[int, float]]:
    """Return each run's validation accuracy, mean over clients, by round."""
    events = ([e for e in r.folder.events() if isinstance(e, Evaluated) and e.split == "validation"] for r in results)
    return [{e.round: e.mean[metric] for e in own if metric in e.mean} for own in events]


def rounds_table(results: Sequence[Result], curves: Sequence[Mapping[int, float]], metric: str) -> Table:
    rows = [[str(at), *(number(curve.get(at)) for curve in curves)] for at in sorted({at for c in curves for at in c})]
    title = f"validation accuracy (%) by round, {metric.replace('_', ', ')}, mean over clients"
    return table_of(title, ["round", *(escape(str(result.folder.path)) for result in results)], rows, texts=0)


# --- cells ---

ABSOLUTE_PATH = re.compile(r"(?<![\w.\-:/])/(?:[^\s/'\"]+/)+([^\s/'\"]+)")


def spread(scores: Iterable[float]) -> str:
    values = list(scores)
    return f"{mean(values):.1f} ± {_sd(values):.1f}" if values else "-"


def _sd(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def range_of(values: Sequence[float], form: str = ".1f") -> str:
    """Return one number, or the smallest and the largest: floors depend on data and widths, which may differ."""
    low, high = (f"{value:{form}}" for value in (min(values), max(values))) if values else ("-", "-")
    return low if low == high else f"{low} to {high}"


def number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1f}"


def volume(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    seconds = max(0, round(seconds))
    if seconds < 90:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def without_folders(text: str) -> str:
    """Shorten absolute paths to their last part, because pages are sent to other people."""
    return ABSOLUTE_PATH.sub(r"\1", text)

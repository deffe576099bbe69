"""Tables of results and of differences between runs."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from ..config import Config, EngineConfig, TrackingConfig
from ..errors import RunError
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
    def label(self) -> str:
        extra = " + RAD images" if self.config.rad.in_ssl else ""
        return f"{self.config.name} / {self.config.method}{extra}"

    @property
    def settings(self) -> Config:
        """The config without seed, engine and tracking; equal for runs that are repetitions of each other."""
        return self.config.model_copy(update={"seed": 0, "engine": EngineConfig(), "tracking": TrackingConfig()})

    def score(self, client: str, metric: str) -> float | None:
        value: float | None = self.results["clients"].get(client, {}).get(metric)
        return value

    @property
    def never_trained(self) -> list[str]:
        """Clients that no round selected, or whose replies were all excluded. They are left out of means."""
        names: list[str] = self.results.get("never_trained", [])
        return names

    def trained_score(self, client: str, metric: str) -> float | None:
        return None if client in self.never_trained else self.score(client, metric)

    def scores(self, metric: str) -> list[float]:
        """Return the scores of the clients that trained."""
        scores = [self.trained_score(client, metric) for client in self.results["clients"]]
        return [score for score in scores if score is not None]

    def floor(self, name: str, metric: str) -> list[float]:
        """Return the scores of features that nobody trained, at the width of each client that trained."""
        clients = self.results["floors"][name].items()
        return [s[metric] for client, s in clients if metric in s and client not in self.never_trained]

    @property
    def floors(self) -> list[str]:
        return list(self.results.get("floors", {}))

    def model(self, client: str) -> dict[str, Any]:
        """Return the client's encoder and its number of parameters."""
        models: dict[str, dict[str, Any]] = self.results.get("models", {})
        return models.get(client, {"encoder": "-"})

    def holdings(self, client: str) -> str:
        """Describe the classes of a client."""
        counts = self.facts.get("holdings", {}).get(client, [])
        names = [name for name, count in zip(self.facts.get("classes", []), counts, strict=False) if count]
        return ", ".join(names) if len(names) <= 4 else f"{len(names)} classes"


def metric_names(result: Result) -> list[str]:
    return sorted({name for scores in result.results["clients"].values() for name in scores})


def results_table(result: Result) -> Table:
    """Return a table with a row per client, a column per metric, and mean and deviation over clients below."""
    metrics = metric_names(result)
    table = Table(title=f"{result.label}, seed {result.config.seed}: accuracy on test images (%)")
    for heading in ("client", "encoder", "holds"):
        table.add_column(heading)
    for metric in metrics:
        table.add_column(metric.replace("_", ", "), justify="right")
    for floor in result.floors:
        table.add_row(floor, "nobody trained these", "", *[spread(result.floor(floor, metric)) for metric in metrics])
    if result.floors:
        table.add_section()
    for client in result.results["clients"]:
        cells = [number(result.score(client, metric)) for metric in metrics]
        name = f"{client} (never trained)" if client in result.never_trained else client
        table.add_row(name, escape(result.model(client)["encoder"]), result.holdings(client), *cells)
    table.add_section()
    trained = len(result.results["clients"]) - len(result.never_trained)
    over = f"over the {trained} clients that trained" if result.never_trained else "over clients"
    table.add_row("mean ± sd", over, "", *[spread(result.scores(m)) for m in metrics])
    untrained = result.results["untrained"]
    if untrained:
        cells = [spread([s[m] for s in untrained.values() if m in s]) for m in metrics]
        table.add_row("untrained", "the same encoders", "", *cells)
    return table


def check_comparable(results: list[Result]) -> None:
    """Raise RunError for runs without accuracies, or on different data: their accuracies say nothing to each other."""
    for result in results:
        if not metric_names(result):
            raise RunError(
                f"'{result.folder.path}' has no accuracies, because its data have no labels. "
                "hetero-ssfl report compares losses and mutual CKA."
            )
    first = results[0]
    for other in results[1:]:
        sources = [r.config.data.source for r in (first, other)]
        shapes = [r.config.data.model_copy(update={"limit": None}) for r in (first, other)]
        pixels = [r.facts.get("checksums", {}).get("test") for r in (first, other)]
        same_classes = first.facts.get("classes") == other.facts.get("classes")
        if sources[0] != sources[1] or not same_classes or (shapes[0] == shapes[1] and pixels[0] != pixels[1]):
            raise RunError(
                f"'{first.folder.path}' and '{other.folder.path}' were trained on different data ('{sources[0]}' and "
                f"'{sources[1]}'), so their accuracies cannot be compared. List runs on the same data."
            )


def compare_rows(results: list[Result], metric: str) -> list[dict[str, Any]]:
    """Group runs by equal settings: mean over clients for each seed, then mean and deviation over seeds."""
    groups: dict[Config, list[Result]] = defaultdict(list)
    for result in results:
        if any(result.config.seed == other.config.seed for other in groups[result.settings]):
            raise RunError(
                f"'{result.folder.path}' has the same settings and seed as another run in the list. List each run once."
            )
        groups[result.settings].append(result)
    labels = [members[0].label for members in groups.values()]
    rows: list[dict[str, Any]] = []
    for members in groups.values():
        label = members[0].label
        if labels.count(label) > 1:  # same name and method, different settings: add the folder's name
            label += f" ({members[0].folder.path.name})"
        per_seed = {r.config.seed: mean(r.scores(metric)) for r in members if r.scores(metric)}
        values = list(per_seed.values())
        rows.append(
            {
                "run": label,
                "seeds": sorted(per_seed),
                "metric": metric,
                "mean": mean(values) if values else None,
                "sd_over_seeds": stdev(values) if len(values) > 1 else None,
                "sd_over_clients": mean([_sd(r.scores(metric)) for r in members]) if values else None,
                "per_seed": per_seed,
            }
        )
    for row in rows:
        first = rows[0]["per_seed"]
        shared = [seed for seed in row["per_seed"] if seed in first]
        row["difference_to_first"] = mean(row["per_seed"][s] - first[s] for s in shared) if shared else None
    for row, members in zip(rows, groups.values(), strict=True):
        row["interval"] = paired_interval(next(iter(groups.values())), members, metric)
    return rows


def floor_rows(results: list[Result], metric: str) -> list[dict[str, Any]]:
    """Return rows like those of `compare_rows` for features that nobody trained, over all runs and seeds."""
    rows = []
    for floor in dict.fromkeys(floor for result in results for floor in result.floors):
        by_seed: dict[int, list[float]] = defaultdict(list)
        for result in results:
            if floor in result.floors:
                by_seed[result.config.seed] += result.floor(floor, metric)
        per_seed = {seed: mean(scores) for seed, scores in by_seed.items() if scores}
        if per_seed:
            values = list(per_seed.values())
            deviation = stdev(values) if len(values) > 1 else None
            row = {"run": floor, "seeds": sorted(per_seed), "metric": metric, "mean": mean(values)}
            row |= {"sd_over_seeds": deviation, "sd_over_clients": None, "per_seed": per_seed}
            rows.append({**row, "difference_to_first": None, "interval": None})
    return rows


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


def paired_interval(first: list[Result], second: list[Result], metric: str) -> list[float] | None:
    """Return the 95 % bootstrap interval of the mean difference (second - first) per client and seed."""
    by_seed = {r.config.seed: r for r in first}
    differences = []
    for run in second:
        other = by_seed.get(run.config.seed)
        names = [n for n in run.results["clients"] if other and other.trained_score(n, metric) is not None]
        pairs = [(run.trained_score(n, metric), other.trained_score(n, metric)) for n in names if other]
        if pairs:
            differences.append([a - b for a, b in pairs if a is not None and b is not None])
    return bootstrap_interval(differences)


def bootstrap_interval(differences: list[list[float]], draws: int = 4000) -> list[float] | None:
    """Return the 95 % interval of the mean of differences, which are given as one list of clients per seed.

    Seeds are drawn first, then clients within each seed, because clients of one run are not independent.
    """
    if not differences:
        return None
    rng = np.random.default_rng(0)
    clients = [np.array(values) for values in differences]
    means = np.empty(draws)
    for draw in range(draws):
        drawn = (clients[seed] for seed in rng.integers(len(clients), size=len(clients)))
        means[draw] = sum(values[rng.integers(len(values), size=len(values))].sum() / len(values) for values in drawn)
    means /= len(clients)
    return [float(value) for value in np.quantile(means, [0.025, 0.975])]


COMPARED = ("run", "seeds", "mean", "sd over seeds", "sd over clients", "difference", "95 % interval")


def compare_cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a table with the columns COMPARED."""
    return [
        [
            row["run"],
            ", ".join(map(str, row["seeds"])),
            *[number(row[key]) for key in ("mean", "sd_over_seeds", "sd_over_clients")],
            signed(row["difference_to_first"]),
            "-" if row["interval"] is None else "{:+.1f} to {:+.1f}".format(*row["interval"]),
        ]
        for row in rows
    ]


def compare_table(rows: list[dict[str, Any]], floors: list[dict[str, Any]]) -> Table:
    metric = rows[0]["metric"]
    table = Table(title=f"test accuracy (%), {metric.replace('_', ', ')}; difference to the first on equal seeds")
    for heading in COMPARED:
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for cells in compare_cells(floors):
        table.add_row(*cells)
    if floors:
        table.add_section()
    for cells in compare_cells(rows):
        table.add_row(*cells)
    return table


# --- cells ---

ABSOLUTE_PATH = re.compile(r"(?<![\w.\-:/])/(?:[^\s/'\"]+/)+([^\s/'\"]+)")


def spread(values: list[float]) -> str:
    return f"{mean(values):.1f} ± {_sd(values):.1f}" if values else "-"


def _sd(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


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

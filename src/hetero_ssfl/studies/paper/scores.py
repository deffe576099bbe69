"""What a table needs of the finished runs of a cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ...errors import ConfigError
from ...report.tables import Result, interval95
from ...runs.events import ClientTrained, RoundDone, never_trained
from ...runs.folder import RunFolder
from .cells import Cell, Scale

GLOBAL = "global model"


@dataclass(frozen=True)
class RunScore:
    """One seed of a cell: what a table needs of a finished run, and how it was made."""

    seed: int
    clients: dict[str, dict[str, float]]
    """The metrics of every client."""
    never_trained: list[str]
    """Clients that no round selected, or whose replies were all excluded."""
    shared: dict[str, float]
    """The metrics of the global model, if the method has one."""
    untrained: dict[str, dict[str, float]]
    """The metrics of every client's encoder before round 1, if they were probed."""
    lost: list[str]
    """Descriptions of excluded replies and of clients that were absent at the end."""
    bytes_sent: float | None
    hours: float
    commit: str

    def trained_values(self, cell: Cell, metric: str) -> list[float]:
        """Return a metric of the clients that the cell covers, if they trained."""
        never = self.never_trained
        return self._values(cell, {name: m for name, m in self.clients.items() if name not in never}, metric)

    def untrained_values(self, cell: Cell, metric: str) -> list[float]:
        """Return a metric of the untrained encoders of the clients that the cell covers."""
        return self._values(cell, self.untrained, metric)

    def never_trained_of(self, cell: Cell) -> int:
        return len(set(list(self.clients)[cell.clients_shown]) & set(self.never_trained))

    def _values(self, cell: Cell, by_client: Mapping[str, Mapping[str, float]], metric: str) -> list[float]:
        shown = [by_client.get(name, {}) for name in list(self.clients)[cell.clients_shown]]
        return [metrics[metric] for metrics in shown if metric in metrics]


def score_run(folder: RunFolder) -> RunScore:
    result, events = Result.read(folder), folder.events()
    replies = [e for e in events if isinstance(e, ClientTrained) and e.round > 0]
    clients = result.results["clients"]
    lost = [f"{e.client} in round {e.round}: {e.excluded}" for e in replies if e.excluded is not None]
    lost += [f"{name} was absent at the end" for name in result.results.get("absent", [])]
    sizes = [e.bytes_up + e.bytes_down for e in replies if e.bytes_up is not None]
    return RunScore(
        seed=result.config.seed,
        clients=clients,
        never_trained=never_trained(clients, events),
        shared=result.results.get("global", {}),
        untrained=result.results["untrained"],
        lost=lost,
        bytes_sent=mean(sizes) if sizes else None,
        hours=round(sum(e.seconds for e in events if isinstance(e, RoundDone)) / 3600, 3),
        commit=str(folder.read_json("environment.json").get("commit")),
    )


def finished_runs(cell: Cell, scale: Scale, seeds: int, root: Path) -> list[RunScore]:
    folders = [RunFolder(cell.folder(root, scale, seed)) for seed in range(seeds)]
    return [score_run(folder) for folder in folders if folder.finished]


def score(cell: Cell, runs: list[RunScore], metric: str = "linear_all", faults: Sequence[str] = ()) -> dict[str, Any]:
    """Return a cell's accuracy after the last round.

    For methods with a global model, this is the accuracy of that model, as their authors report it; for other methods
    it is the mean over the clients' own models, `clients_mean`. Only clients that trained are averaged. `faults` are
    the reasons for which runs of the cell stopped.
    """
    known = sorted({name for run in runs for metrics in run.clients.values() for name in metrics})
    if known and metric not in known:
        raise ConfigError(f"'{cell.name}' has no metric '{metric}'. Choose --metric from: {', '.join(known)}.")
    of_clients = [values for run in runs if (values := run.trained_values(cell, metric))]
    client_means = [mean(values) for values in of_clients]
    shared = [run.shared[metric] for run in runs if metric in run.shared]
    values = shared or client_means
    spreads = [stdev(values) for values in of_clients if len(values) > 1]
    untrained = [value for run in runs for value in run.untrained_values(cell, metric)]
    classifiers = [run.shared["classifier_all"] for run in runs if "classifier_all" in run.shared]
    sent = [run.bytes_sent for run in runs if run.bytes_sent is not None]
    return {
        "cell": cell.name,
        "metric": metric,
        "seeds": len(values),
        "mean": mean(values) if values else None,
        "sd_over_seeds": stdev(values) if len(values) > 1 else None,
        "interval95": interval95(values),
        "of": GLOBAL if shared else "clients",
        "clients_mean": mean(client_means) if client_means else None,
        "sd_over_clients": mean(spreads) if spreads else None,
        "untrained_mean": mean(untrained) if untrained else None,
        "classifier_mean": mean(classifiers) if classifiers else None,
        "trained_clients": sum(len(values) for values in of_clients),
        "never_trained_clients": sum(run.never_trained_of(cell) for run in runs),
        "lost": [*faults, *(text for run in runs for text in run.lost)],
        "stopped_runs": len(faults),
        "bytes_per_client_and_round": round(mean(sent)) if sent else None,
        "paper": cell.reported,
    }

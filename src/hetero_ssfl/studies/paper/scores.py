"""What a table needs of the finished runs of a cell, and their results as small files that can be committed.

One file per run, RESULTS/SCALE/TABLE/CELL-seedN.json: the figures of `RunScore`, the command that made them, and a
digest of the settings. A run that is kept is not run again, so a table can be continued on another machine without its
run folders (gigabytes). A kept run of other settings than the cell has now is refused.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
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
    clients: dict[str, dict[str, float]]  # the metrics of every client
    never_trained: list[str]  # clients that no round selected, or whose replies were all excluded
    shared: dict[str, float]  # the metrics of the global model, if the method has one
    untrained: dict[str, dict[str, float]]  # of every client's encoder before round 1, if they were probed
    lost: list[str]  # descriptions of excluded replies and of clients that were absent at the end
    bytes_sent: float | None
    hours: float
    commit: str
    floors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """The metrics of features that nobody trained, at the width of every client; runs kept earlier have none."""


def score_run(folder: RunFolder) -> RunScore:
    result, events = Result.read(folder), folder.events()
    replies = [e for e in events if isinstance(e, ClientTrained) and e.round > 0]
    clients = result.results["clients"]
    lost = [f"{e.client} in round {e.round}: {e.excluded}" for e in replies if e.excluded is not None]
    lost += [f"{name} was absent at the end" for name in result.results.get("absent", [])]
    return RunScore(
        seed=result.config.seed,
        clients=clients,
        never_trained=never_trained(clients, events),
        shared=result.results.get("global", {}),
        untrained=result.results["untrained"],
        lost=lost,
        bytes_sent=_mean([e.bytes_up + e.bytes_down for e in replies if e.bytes_up is not None]),
        hours=round(sum(e.seconds for e in events if isinstance(e, RoundDone)) / 3600, 3),
        commit=str(folder.read_json("environment.json").get("commit")),
        floors=result.results.get("floors", {}),
    )


def finished_runs(folders: Sequence[Path]) -> list[RunScore]:
    return [score_run(RunFolder(folder)) for folder in folders if RunFolder(folder).finished]


def score(cell: Cell, runs: list[RunScore], metric: str = "linear_all", faults: Sequence[str] = ()) -> dict[str, Any]:
    """Return a cell's accuracy after the last round.

    For methods with a global model, this is the accuracy of that model, as their authors report it; for other methods
    it is the mean over the clients' own models, `clients_mean`. Only clients that trained are averaged. `faults` are
    the reasons for which runs of the cell stopped.
    """
    known = sorted({name for run in runs for metrics in run.clients.values() for name in metrics})
    if known and metric not in known:
        raise ConfigError(f"'{cell.name}' has no metric '{metric}'. Choose --metric from: {', '.join(known)}.")

    def shown(run: RunScore, without: Collection[str] = ()) -> list[str]:
        """Return the clients that the cell covers."""
        return [name for name in list(run.clients)[cell.clients_shown] if name not in without]

    def values_of(clients: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[float]:
        return [clients[name][metric] for name in names if metric in clients.get(name, {})]

    of_clients = [values for run in runs if (values := values_of(run.clients, shown(run, run.never_trained)))]
    client_means = [mean(values) for values in of_clients]
    shared = [run.shared[metric] for run in runs if metric in run.shared]
    values, sent = shared or client_means, _mean([run.bytes_sent for run in runs if run.bytes_sent is not None])
    floors: dict[str, list[float]] = {}
    for run in runs:
        for floor, clients in run.floors.items():
            floors.setdefault(floor, []).extend(values_of(clients, shown(run)))
    return {
        "cell": cell.name,
        "metric": metric,
        "seeds": len(values),
        "mean": _mean(values),
        "sd_over_seeds": stdev(values) if len(values) > 1 else None,
        "interval95": interval95(values),
        "of": GLOBAL if shared else "clients",
        "clients_mean": _mean(client_means),
        "sd_over_clients": _mean([stdev(values) for values in of_clients if len(values) > 1]),
        "untrained_mean": _mean([value for run in runs for value in values_of(run.untrained, shown(run))]),
        "floors": {floor: mean(values) for floor, values in floors.items() if values},
        "classifier_mean": _mean([run.shared["classifier_all"] for run in runs if "classifier_all" in run.shared]),
        "trained_clients": sum(len(values) for values in of_clients),
        "never_trained_clients": sum(name in run.never_trained for run in runs for name in shown(run)),
        "lost": [*faults, *(text for run in runs for text in run.lost)],
        "stopped_runs": len(faults),
        "bytes_per_client_and_round": None if sent is None else round(sent),
        "paper": cell.reported,
    }


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


# --- kept runs ---


def result_file(results: Path, cell: Cell, scale: Scale, seed: int) -> Path:
    return results / scale / f"{cell.run_name(seed)}.json"


def keep(cell: Cell, seed: int, scale: Scale, root: Path, results: Path) -> None:
    """Write the figures of a finished run."""
    command = f"hetero-ssfl paper {cell.table} --scale {scale} --only '{cell.name}' --seeds {seed + 1}"
    about = {"command": command, "settings": digest_of_settings(cell, scale, seed)}
    file, run = result_file(results, cell, scale, seed), score_run(RunFolder(cell.folder(root, scale, seed)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**about, **asdict(run)}, indent=1) + "\n")


def digest_of_settings(cell: Cell, scale: Scale, seed: int) -> str:
    """Return a digest of all settings that can change the figures and differ from their defaults."""
    config = cell.config(scale, seed)
    unused = {"name", "engine"} | (set() if config.method == "hetero-ssfl" else {"alignment"})
    settings = config.model_dump(mode="json", exclude_defaults=True, exclude=unused)
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def kept_runs(results: Path, cell: Cell, scale: Scale) -> list[RunScore]:
    first = result_file(results, cell, scale, 0)
    files = first.parent.glob(first.name.replace("seed0", "seed*"))
    return sorted((_read(file, cell, scale) for file in files), key=lambda run: run.seed)


def is_kept(results: Path, cell: Cell, scale: Scale, seed: int) -> bool:
    file = result_file(results, cell, scale, seed)
    return file.exists() and _read(file, cell, scale).seed == seed


def _read(file: Path, cell: Cell, scale: Scale) -> RunScore:
    try:
        values = json.loads(file.read_text())
        values.pop("command")
        settings, run = values.pop("settings"), RunScore(**values)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"'{file}' is not a result of `hetero-ssfl paper --keep`. Delete it and run again.") from None
    if settings != digest_of_settings(cell, scale, run.seed):
        raise ConfigError(
            f"'{file}' was made at commit {run.commit} with other settings than '{cell.name}' has now. "
            "Delete it and run again, or use that commit."
        )
    return run

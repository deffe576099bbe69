"""The paper's four tables, cell by cell, at four scales.

`full` is exactly the paper's setting (GPUs). `workstation` is the scale of docs/results.md: encoders that learn, in
minutes per cell on one core. `laptop` is smaller. `smoke` runs every cell in seconds on embedded digits instead of the
real data sets, to show that the code works.
A cell is one run folder per seed. Missing or unfinished runs are run or resumed.
"""

import difflib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from rich.progress import track
from rich.table import Table

from .config import Config, load_config, parse_config
from .errors import ConfigError, FaultError, TooFewRepliesError
from .events import ClientTrained, RoundDone, never_trained
from .federation import end_with_parent, start
from .progress import RunView
from .report.tables import Result, interval95
from .runs import RunFolder
from .screen import Console

TableName = Literal["table1", "table2", "table3", "table4"]
Scale = Literal["full", "workstation", "laptop", "smoke"]

HETERO, OURS = "Hetero-SSFL", "Hetero-SSFL, our defaults"
OURS_RAD = "Hetero-SSFL with RAD images, our defaults"
FEDSIMCLR = "FedSimCLR"
ALONE, ALONE_RAD = "local SSL, our defaults", "local SSL with RAD images, our defaults"
GLOBAL = "global model"

# The paper's alignment settings that differ from our defaults. The preset `paper` already contains them.
LITERAL = [
    "alignment.layer=predictor",
    "alignment.row_normalize=false",
    "alignment.power=1.0",
    "alignment.augment_rad=false",
    "alignment.distance=cka",
    "alignment.live_layer=predictor",
    "alignment.every=1",
    "alignment.ramp_rounds=0",
]

ROW_SETTINGS: dict[str, list[str]] = {
    "FedBYOL": ["method=fedbyol"],
    "FedSimSiam": ["method=fedsimsiam", "ssl.kind=simsiam"],
    FEDSIMCLR: ["method=fedssl", "ssl.kind=simclr", "rad.in_ssl=false"],
    "FedU": ["method=fedu"],
    "FedEMA": ["method=fedema"],
    HETERO: ["method=hetero-ssfl", *LITERAL],
    OURS: ["method=hetero-ssfl", "rad.in_ssl=false"],
    OURS_RAD: ["method=hetero-ssfl", "rad.in_ssl=true"],
    ALONE: ["method=local", "rad.in_ssl=false"],
    ALONE_RAD: ["method=local", "rad.in_ssl=true"],
    "FedEMA with RAD images": ["method=fedema", "rad.in_ssl=true"],
    "supervised FedAvg": ["method=fedavg"],
    "central BYOL": ["method=local", "clients.count=1", "partition.kind=iid"],
    "local SSL": ["method=local"],
}

OUR_ROWS = (OURS, OURS_RAD, ALONE, ALONE_RAD)

# Settings of each method at scale `workstation`, chosen on validation images of CIFAR-10 with the same number of trials
# for each: experiments/selection.py, results/selection/. Our own rows had more trials than that: docs/results.md.
SGD = ["optim.kind=sgd", "optim.weight_decay=5e-4", "optim.warmup=0.5"]
ADAMW = ["optim.kind=adamw", "optim.weight_decay=0.01", "optim.warmup=0.5"]
CHOSEN: dict[str, list[str]] = {
    "FedBYOL": [*SGD, "optim.lr=0.1", "ssl.ema=0.9"],
    "FedSimSiam": [*ADAMW, "optim.lr=0.006"],
    FEDSIMCLR: [*SGD, "optim.lr=0.05"],
    "FedU": [*SGD, "optim.lr=0.1", "averaging.threshold=0.2"],
    "FedEMA": [*SGD, "optim.lr=0.1"],
    HETERO: [*ADAMW, "optim.lr=0.003"],
    "supervised FedAvg": [*ADAMW, "optim.lr=0.006"],
    "central BYOL": [*SGD, "optim.lr=0.1", "ssl.ema=0.95"],
    "local SSL": [*ADAMW, "optim.lr=0.003"],
}

DATA: dict[str, list[str]] = {
    "CIFAR-10": ["data.source=cifar10", "averaging.threshold=0.4"],
    "CIFAR-100": ["data.source=cifar100", "averaging.threshold=0.6"],
    "Tiny-ImageNet": ["data.source=tiny-imagenet", "averaging.threshold=0.6"],
}

MU = {"CIFAR-10": "0.5", "CIFAR-100": "0.5", "Tiny-ImageNet": "1"}

# At scale `workstation` our own rows use the preset's recipe. FedSimCLR averages weights with the same local loss. The
# other rows share its images, views and batches, and train with BYOL (or SimSiam) as their authors do. Their optimiser
# is the preset's unless CHOSEN has another.
AS_PUBLISHED = ["ssl.kind=byol", "rad.in_ssl=false"]

# preset, overrides, (small model, large model): clients of Hetero-SSFL alternate, all others have the large one.
SCALES: dict[str, tuple[str, list[str], tuple[str, str]]] = {
    "full": ("paper", [], ("resnet18", "resnet34")),
    "workstation": (
        "cifar10-workstation",
        ["local_epochs=2", "evaluation.every=0"],
        ("resnet8(width=16)", "resnet14(width=16)"),
    ),
    "laptop": ("cifar10-laptop", ["evaluation.every=0"], ("resnet8(width=16)", "resnet14(width=16)")),
    "smoke": ("smoke", ["evaluation.every=0", "local_epochs=2"], ("resnet8(width=4)", "resnet8(width=8)")),
}

CLIENTS = {"5 (5)": (5, 5), "20 (5)": (20, 5), "100 (10)": (100, 10)}

# At scale `workstation` 100 clients have 70 images each: one step per epoch with the preset's batch of 64.
SMALL_BATCH = {"20 (5)": 32, "100 (10)": 16}

FIGURES: dict[str, dict[str, list[str]]] = {
    "table1": {
        "FedBYOL": ["78.1 ± 1.1", "58.1 ± 0.3", "31.8 ± 2.0"],
        "FedSimSiam": ["76.7 ± 1.5", "53.2 ± 0.16", "29.1 ± 1.2"],
        "FedU": ["79.6 ± 0.5", "58.9 ± 0.12", "58.23 ± 2.3"],
        "FedEMA": ["81.2 ± 1.6", "61.8 ± 0.31", "58.2 ± 3.1"],
        HETERO: ["90.29 ± 0.3", "67.7 ± 0.21", "61.5 ± 1.8"],
        OURS: ["-", "-", "-"],
        OURS_RAD: ["-", "-", "-"],
        ALONE: ["-", "-", "-"],
        ALONE_RAD: ["-", "-", "-"],
        FEDSIMCLR: ["-", "-", "-"],
        "FedEMA with RAD images": ["-", "-", "-"],
        "supervised FedAvg": ["68.5 ± 1.7", "44.29 ± 1.34", "27.2 ± 3.2"],
        "central BYOL": ["94.3 ± 0.2", "74.2 ± 0.67", "78.7 ± 1.3"],
    },
    "table2": {
        "FedBYOL": ["82.24 ± 0.8", "23.8 ± 0.14"],
        "FedSimSiam": ["80.4 ± 1.2", "22.19 ± 1.8"],
        "FedU": ["81.6 ± 1.8", "20.4 ± 0.91"],
        "FedEMA": ["85.9 ± 0.3", "25.7 ± 0.4"],
        HETERO: ["88.5 ± 1.3", "34.8 ± 0.7"],
        OURS: ["-", "-"],
        ALONE: ["-", "-"],
        FEDSIMCLR: ["-", "-"],
    },
    "table3": {
        "FedU": ["58.9 ± 0.12", "48.29 ± 1.8", "41.1 ± 2.3"],
        "FedEMA": ["61.8 ± 0.31", "52.5 ± 0.8", "42.0 ± 2.7"],
        HETERO: ["67.7 ± 0.21", "57.5 ± 0.9", "43.3 ± 1.9"],
        OURS: ["-", "-", "-"],
        ALONE: ["-", "-", "-"],
        FEDSIMCLR: ["-", "-", "-"],
    },
    "table4": {
        "local SSL": ["71.9", "77.8"],
        HETERO: ["85.4", "93.7"],
        ALONE: ["-", "-"],
        OURS: ["-", "-"],
    },
}

COLUMNS = {
    "table1": ["CIFAR-10", "CIFAR-100", "Tiny-ImageNet"],
    "table2": ["CIFAR-10", "CIFAR-100"],
    "table3": list(CLIENTS),
    "table4": ["small clients", "large clients"],
}


@dataclass(frozen=True)
class Cell:
    table: str
    row: str
    column: str
    figure: str

    @property
    def name(self) -> str:
        return f"{self.column}/{self.row}"

    @property
    def source(self) -> tuple[str, str]:
        """The table and column whose run this cell shows.

        Both columns of Table 4 show one run, by architecture. Its federated rows are those of Table 1, and so is the
        first column of Table 3.
        """
        if self.table == "table4":
            return ("table1", "CIFAR-10") if self.row in FIGURES["table1"] else ("table4", "all")
        return ("table1", "CIFAR-100") if self.column == "5 (5)" else (self.table, self.column)

    @property
    def clients_shown(self) -> slice:
        """The clients that the cell covers. Table 4 shows one architecture, which every second client has."""
        return {"small clients": slice(0, None, 2), "large clients": slice(1, None, 2)}.get(self.column, slice(None))

    def run_name(self, seed: int) -> Path:
        """Return where a run of this cell belongs below the folder of a scale; cells with the same run share it."""
        table, column = self.source
        words = f"{column} {self.row}".replace("(", "").replace(")", "").replace(",", "").split()
        return Path(table) / f"{'-'.join(words)}-seed{seed}"

    def folder(self, root: Path, scale: str, seed: int) -> Path:
        return root / scale / self.run_name(seed)

    def config(self, scale: str, seed: int, overrides: Sequence[str] = (), chosen: bool = True) -> Config:
        """Return the settings of a run; without `chosen`, those with which experiments/selection.py begins."""
        preset, changes, (small, large) = SCALES[scale]
        data = self.column if self.column in DATA else {"table3": "CIFAR-100", "table4": "CIFAR-10"}[self.table]
        mixed = self.row in (HETERO, *OUR_ROWS) or self.table == "table4"
        models = [small, large] if mixed else [large]
        settings = [
            f"name={self.source[0]}",
            f"seed={seed}",
            f"clients.models={models}",
            *(DATA[data] if scale != "smoke" else []),
            f"partition.kind={'iid' if self.table == 'table2' else 'classes'}",
            *([f"alignment.mu={MU[data]}"] if self.row == HETERO else []),
            *changes,
        ]
        count, per_round = CLIENTS.get(self.column, (5, 5))
        settings += [f"clients.count={count}", f"clients.per_round={per_round}"]
        if scale == "workstation" and count > per_round:  # as many epochs per client as with all clients in each round
            turns, base = count // per_round, load_config(preset)
            settings += [f"rounds={base.rounds * turns}", f"alignment.ramp_rounds={base.alignment.ramp_rounds * turns}"]
            settings += [f"optim.batch={SMALL_BATCH[self.column]}"]
        if self.row == "central BYOL":
            settings += ["clients.per_round=1"]
        return load_config(preset, [*settings, *_recipe(scale, self.row, chosen), *ROW_SETTINGS[self.row], *overrides])


def _recipe(scale: str, row: str, chosen: bool) -> list[str]:
    """Return what the preset of the scale does not say: settings of other methods than ours at scale `workstation`,
    and our defaults at full scale, where preset `paper` replaces them."""
    if scale == "workstation" and row not in OUR_ROWS:
        published = [] if row == FEDSIMCLR else AS_PUBLISHED
        return [*published, *(CHOSEN.get(row.removesuffix(" with RAD images"), []) if chosen else [])]
    if scale != "full" or row not in OUR_ROWS:
        return []
    ours = Config().alignment
    keys = ("layer", "row_normalize", "power", "augment_rad", "mu")
    values = {key: getattr(ours, key) for key in keys}
    return [f"alignment.{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in values.items()]


def cells_of(table: TableName, only: str | None = None) -> list[Cell]:
    """Return all cells of a table, or only those of one `column/row`, row or column."""
    cells = [
        Cell(table, row, column, figure)
        for row, figures in FIGURES[table].items()
        for column, figure in zip(COLUMNS[table], figures, strict=True)
    ]
    chosen = [cell for cell in cells if only is None or only in (cell.name, cell.row, cell.column)]
    if not chosen:
        near = difflib.get_close_matches(str(only), [cell.name for cell in cells], n=1)
        hint = f"the nearest is '{near[0]}'" if near else f"expected a form such as '{cells[0].name}'"
        raise ConfigError(f"{table} has no cell '{only}': {hint}.")
    return chosen


def run_cells(
    cells: list[Cell],
    scale: Scale,
    seeds: int,
    root: Path,
    console: Console,
    quiet: bool,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    known: Callable[[Cell, int], bool] = lambda *_: False,
    done: Callable[[Cell, int], None] = lambda *_: None,
) -> dict[Path, str]:
    """Run or resume unfinished cells, `jobs` runs at a time. Finished cells are left unchanged.

    `known` says which cells and seeds need no run here; `done` is called after each of the others has finished.
    Return the reason for each run that a fault or a diverged loss stopped; the other cells are run nevertheless.
    """
    runs = {
        cell.folder(root, scale, seed): (cell, seed) for seed in range(seeds) for cell in cells if not known(cell, seed)
    }
    configs = {path: cell.config(scale, seed, overrides) for path, (cell, seed) in runs.items()}
    titles = {path: f"{cell.name}, seed {seed}" for path, (cell, seed) in runs.items()}
    stopped: dict[Path, str] = {}
    if jobs == 1:
        for path, config in configs.items():
            try:
                with RunView(console, titles[path], quiet) as view:
                    start(config, path, view)
                done(*runs[path])
            except (FaultError, TooFewRepliesError) as error:
                stopped[path] = str(error)
        return stopped
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        waiting = {pool.submit(_run_alone, config.to_toml(), path): path for path, config in configs.items()}
        results = track(as_completed(waiting), f"{jobs} runs at a time", len(waiting), console=console, disable=quiet)
        for result in results:
            path, fault = waiting[result], result.result()
            if fault:
                stopped[path] = fault
            else:
                done(*runs[path])
            if not quiet:
                console.print(f"{titles[path]}: {'stopped' if fault else 'done'}", highlight=False)
    return stopped


def _run_alone(config: str, path: Path) -> str | None:
    """Run one cell without progress output, in a separate process. Return the fault that stopped it, if any."""
    try:
        start(parse_config(config), path, lambda _: None)
    except (FaultError, TooFewRepliesError) as error:
        return str(error)
    return None


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

    def values(self, cell: Cell, metric: str) -> list[float]:
        """Return a metric of the clients that the cell covers, if they trained."""
        trained = [self.clients[name] for name in self._names(cell) if name not in self.never_trained]
        return [figures[metric] for figures in trained if metric in figures]

    def untrained_values(self, cell: Cell, metric: str) -> list[float]:
        """Return a metric of the untrained encoders of the clients that the cell covers."""
        covered = [self.untrained[name] for name in self._names(cell) if name in self.untrained]
        return [figures[metric] for figures in covered if metric in figures]

    def never_trained_of(self, cell: Cell) -> int:
        return len(set(self._names(cell)) & set(self.never_trained))

    def _names(self, cell: Cell) -> list[str]:
        return list(self.clients)[cell.clients_shown]


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
    known = sorted({name for run in runs for figures in run.clients.values() for name in figures})
    if known and metric not in known:
        raise ConfigError(f"'{cell.name}' has no metric '{metric}'. Choose --metric from: {', '.join(known)}.")
    of_clients = [values for run in runs if (values := run.values(cell, metric))]
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
        "paper": cell.figure,
    }


def paper_table(table: TableName, scores: list[dict[str, Any]], scale: Scale) -> Table:
    """Build a table with our figure and the paper's figure in each cell."""
    titles = {
        "table1": "Table 1: non-IID",
        "table2": "Table 2: IID",
        "table3": "Table 3: CIFAR-100, clients (per round)",
        "table4": "Table 4: alone and together",
    }
    stand_in = "; digits instead of the real data sets" if scale == "smoke" else ""
    notes = [
        "g: global model, with the clients' own models in brackets"
        if any(s.get("of") == GLOBAL for s in scores)
        else "",
        "!: replies, clients or whole runs were lost" if any(s.get("lost") for s in scores) else "",
    ]
    out = Table(
        title=f"{titles[table]}, scale {scale}{stand_in}. Test accuracy (%, {scores[0]['metric']}), last round: "
        "mean ± deviation over seeds \\[deviation over clients] | in the paper",
        caption="; ".join(filter(None, notes)) or None,
    )
    out.add_column("method")
    for column in COLUMNS[table]:
        out.add_column(f"{column}{_seeds(column, scores)}", justify="right")
    out.add_column("bytes per client\nand round", justify="right")
    found = {entry["cell"]: entry for entry in scores}
    for row, figures in FIGURES[table].items():
        entries = [found.get(f"{column}/{row}", {}) for column in COLUMNS[table]]
        sizes = [e["bytes_per_client_and_round"] for e in entries if e.get("bytes_per_client_and_round")]
        shown = [f"{_accuracy(entry)} | {figure}" for entry, figure in zip(entries, figures, strict=True)]
        out.add_row(row, *shown, f"{round(mean(sizes)):,}" if sizes else "-")
    probed = [entry for entry in scores if entry.get("untrained_mean") is not None]
    floors = [[entry["untrained_mean"] for entry in probed if _column(entry) == c] for c in COLUMNS[table]]
    if any(floors):
        ranges = ["-" if not f else f"{min(f):.1f} to {max(f):.1f} | -" for f in floors]
        out.add_row("untrained encoders of these rows", *ranges, "-")
    return out


def _column(entry: dict[str, Any]) -> str:
    return str(entry["cell"]).partition("/")[0]


def _seeds(column: str, scores: list[dict[str, Any]]) -> str:
    """Return how many seeds the cells of a column have, for its header."""
    counts = {entry["seeds"] for entry in scores if _column(entry) == column and entry.get("seeds")}
    if not counts:
        return ""
    text = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"\n{text} seed{'' if counts == {1} else 's'}"


def _accuracy(entry: dict[str, Any]) -> str:
    if entry.get("mean") is None:
        return "incomplete !" if entry.get("lost") else "-"
    seeds, clients = entry["sd_over_seeds"], entry["sd_over_clients"]
    text = f"{entry['mean']:.1f}" + (f" ± {seeds:.1f}" if seeds is not None else "")
    if entry.get("of") == GLOBAL:
        text += f" g (clients {entry['clients_mean']:.1f})" if entry["clients_mean"] is not None else " g"
    elif clients is not None:
        text += f" \\[{clients:.1f}]"
    if entry.get("classifier_mean") is not None:
        text += f" (own classifier {entry['classifier_mean']:.1f})"
    if entry.get("never_trained_clients"):
        everyone = entry["trained_clients"] + entry["never_trained_clients"]
        text += f" ({entry['trained_clients']} of {everyone} clients trained)"
    if entry.get("stopped_runs"):
        text += f" ({entry['stopped_runs']} runs incomplete)"
    return f"{text} !" if entry.get("lost") else text

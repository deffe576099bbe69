"""The paper's four tables, cell by cell, at three scales.

`full` is the paper's setting to the letter (GPUs), `laptop` keeps its shape at a size that 2 cores can run, and `smoke`
runs every cell in seconds on embedded digits, which stand in for every data set: it shows that the machinery works.
A cell is one run folder per seed; whatever is missing is run or resumed.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from .config import Config, load_config
from .errors import ConfigError
from .events import ClientTrained
from .federation import start
from .progress import RunView
from .report.tables import Result
from .runs import RunFolder

TableName = Literal["table1", "table2", "table3", "table4"]
Scale = Literal["full", "laptop", "smoke"]

HETERO, OURS = "Hetero-SSFL", "Hetero-SSFL, our defaults"

# How the paper's reading of the alignment differs from our defaults; `preset paper` has it already.
LITERAL = [
    "alignment.layer=predictor",
    "alignment.row_normalize=false",
    "alignment.power=1.0",
    "alignment.augment_rad=false",
]

ROW_SETTINGS: dict[str, list[str]] = {
    "FedBYOL": ["method=fedbyol"],
    "FedSimSiam": ["method=fedsimsiam", "ssl.kind=simsiam"],
    "FedU": ["method=fedu"],
    "FedEMA": ["method=fedema"],
    HETERO: ["method=hetero-ssfl", *LITERAL],
    OURS: ["method=hetero-ssfl"],
    "supervised FedAvg": ["method=fedavg"],
    "central BYOL": ["method=local", "clients.count=1", "partition.kind=iid"],
    "local SSL": ["method=local"],
}

DATA: dict[str, list[str]] = {
    "CIFAR-10": ["data.source=cifar10", "averaging.threshold=0.4"],
    "CIFAR-100": ["data.source=cifar100", "averaging.threshold=0.6"],
    "Tiny-ImageNet": ["data.source=tiny-imagenet", "averaging.threshold=0.6"],
}

MU = {"CIFAR-10": "0.5", "CIFAR-100": "0.5", "Tiny-ImageNet": "1"}

# preset, overrides, (small model, large model): clients of Hetero-SSFL alternate, all others have the large one.
SCALES: dict[str, tuple[str, list[str], tuple[str, str]]] = {
    "full": ("paper", [], ("resnet18", "resnet34")),
    "laptop": ("cifar10-laptop", ["evaluation.every=0"], ("resnet8(width=16)", "resnet14(width=16)")),
    "smoke": ("smoke", ["evaluation.every=0", "local_epochs=2"], ("resnet8(width=4)", "resnet8(width=8)")),
}

CLIENTS = {"5 (5)": (5, 5), "20 (5)": (20, 5), "100 (10)": (100, 10)}

FIGURES: dict[str, dict[str, list[str]]] = {
    "table1": {
        "FedBYOL": ["78.1 ± 1.1", "58.1 ± 0.3", "31.8 ± 2.0"],
        "FedSimSiam": ["76.7 ± 1.5", "53.2 ± 0.16", "29.1 ± 1.2"],
        "FedU": ["79.6 ± 0.5", "58.9 ± 0.12", "58.23 ± 2.3"],
        "FedEMA": ["81.2 ± 1.6", "61.8 ± 0.31", "58.2 ± 3.1"],
        HETERO: ["90.29 ± 0.3", "67.7 ± 0.21", "61.5 ± 1.8"],
        OURS: ["-", "-", "-"],
        "supervised FedAvg": ["68.5 ± 1.7", "44.29 ± 1.34", "27.2 ± 3.2"],
        "central BYOL": ["94.3 ± 0.2", "74.2 ± 0.67", "78.7 ± 1.3"],
    },
    "table2": {
        "FedBYOL": ["82.24", "23.8"],
        "FedSimSiam": ["80.4", "22.19"],
        "FedU": ["81.6", "20.4"],
        "FedEMA": ["85.9", "25.7"],
        HETERO: ["88.5", "34.8"],
        OURS: ["-", "-"],
    },
    "table3": {
        "FedU": ["58.9", "48.29", "41.1"],
        "FedEMA": ["61.8", "52.5", "42.0"],
        HETERO: ["67.7", "57.5", "43.3"],
        OURS: ["-", "-", "-"],
    },
    "table4": {
        "local SSL": ["71.9", "77.8"],
        HETERO: ["85.4", "93.7"],
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
    def clients_shown(self) -> slice:
        """Table 4 shows the clients of one architecture: they alternate, so every second one."""
        return {"small clients": slice(0, None, 2), "large clients": slice(1, None, 2)}.get(self.column, slice(None))

    def folder(self, root: Path, scale: str, seed: int) -> Path:
        # The two columns of Table 4 are one run seen from two sides.
        column = "all" if self.table == "table4" else self.column
        words = f"{column} {self.row}".replace("(", "").replace(")", "").replace(",", "").split()
        return root / scale / self.table / f"{'-'.join(words)}-seed{seed}"

    def config(self, scale: str, seed: int) -> Config:
        preset, overrides, (small, large) = SCALES[scale]
        data = self.column if self.column in DATA else {"table3": "CIFAR-100", "table4": "CIFAR-10"}[self.table]
        mixed = self.row in (HETERO, OURS) or self.table == "table4"
        models = [small, large] if mixed else [large]
        settings = [
            f"name={self.table}",
            f"seed={seed}",
            f"clients.models={models}",
            *(DATA[data] if scale != "smoke" else []),
            f"partition.kind={'iid' if self.table == 'table2' else 'classes'}",
            *([f"alignment.mu={MU[data]}"] if self.row == HETERO else []),
            *overrides,
        ]
        count, per_round = CLIENTS.get(self.column, (5, 5))
        settings += [f"clients.count={count}", f"clients.per_round={per_round}"]
        if self.row == "central BYOL":
            settings += ["clients.per_round=1"]
        return load_config(preset, [*settings, *_ours(scale, self.row), *ROW_SETTINGS[self.row]])


def _ours(scale: str, row: str) -> list[str]:
    """At full scale `preset paper` is literal: our defaults have to be named."""
    if scale != "full" or row != OURS:
        return []
    ours = Config().alignment
    keys = ("layer", "row_normalize", "power", "augment_rad", "mu")
    values = {key: getattr(ours, key) for key in keys}
    return [f"alignment.{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in values.items()]


def cells_of(table: TableName, only: str | None = None) -> list[Cell]:
    """All cells of a table, or those of one `column/row`, row or column."""
    cells = [
        Cell(table, row, column, figure)
        for row, figures in FIGURES[table].items()
        for column, figure in zip(COLUMNS[table], figures, strict=True)
    ]
    chosen = [cell for cell in cells if only is None or only in (cell.name, cell.row, cell.column)]
    if not chosen:
        near = difflib.get_close_matches(str(only), [cell.name for cell in cells], n=1)
        hint = f"the nearest is '{near[0]}'" if near else f"expected a form such as '{cells[0].name}'"
        raise ConfigError(f"no cell '{only}' in {table}: {hint}.")
    return chosen


def run_cells(cells: list[Cell], scale: Scale, seeds: int, root: Path, console: Console, quiet: bool) -> None:
    """Run or resume whatever is missing; a finished cell is left as it is."""
    for seed in range(seeds):
        for cell in cells:
            with RunView(console, f"{cell.name}, seed {seed}", quiet) as view:
                start(cell.config(scale, seed), cell.folder(root, scale, seed), view)


def score(cell: Cell, scale: Scale, seeds: int, root: Path, metric: str = "linear_all") -> dict[str, Any]:
    """A cell's accuracy: of the last round, mean and deviation over its clients, then over seeds."""
    values, spreads, sent, shared = list[float](), list[float](), list[float](), list[float]()
    for seed in range(seeds):
        folder = RunFolder(cell.folder(root, scale, seed))
        if not folder.finished:
            continue
        result = Result.read(folder)
        clients = list(result.results["clients"].values())
        known = sorted({key for figures in clients for key in figures})
        scores = [figures[metric] for figures in clients[cell.clients_shown] if metric in figures]
        if not scores and known:
            raise ConfigError(f"no figure '{metric}' in '{folder.path}'. Choose --metric from: {', '.join(known)}.")
        if scores:
            values.append(mean(scores))
        if len(scores) > 1:
            spreads.append(stdev(scores))
        if metric in result.results.get("global", {}):
            shared.append(result.results["global"][metric])
        trained = [e for e in folder.events() if isinstance(e, ClientTrained) and e.round > 0]
        bytes_sent = [e.bytes_up + e.bytes_down for e in trained if e.bytes_up is not None]
        if bytes_sent:
            sent.append(mean(bytes_sent))
    return {
        "cell": cell.name,
        "metric": metric,
        "seeds": len(values),
        "mean": mean(values) if values else None,
        "sd_over_seeds": stdev(values) if len(values) > 1 else None,
        "sd_over_clients": mean(spreads) if spreads else None,
        "bytes_per_client_and_round": round(mean(sent)) if sent else None,
        "global_mean": mean(shared) if shared else None,
        "paper": cell.figure,
    }


def paper_table(table: TableName, scores: list[dict[str, Any]], scale: Scale) -> Table:
    """Each cell: ours, and the paper's figure behind it."""
    titles = {
        "table1": "Table 1: non-IID",
        "table2": "Table 2: IID",
        "table3": "Table 3: CIFAR-100, clients (per round)",
        "table4": "Table 4: alone and together",
    }
    stand_in = "; digits stand in for every data set" if scale == "smoke" else ""
    out = Table(
        title=f"{titles[table]}, scale {scale}{stand_in}. Test accuracy (%, {scores[0]['metric']}), last round: "
        "mean ± deviation over seeds \\[deviation over clients] | in the paper"
    )
    out.add_column("method")
    for column in COLUMNS[table]:
        out.add_column(column, justify="right")
    out.add_column("bytes per client\nand round", justify="right")
    found = {entry["cell"]: entry for entry in scores}
    for row, figures in FIGURES[table].items():
        entries = [found.get(f"{column}/{row}", {}) for column in COLUMNS[table]]
        sizes = [e["bytes_per_client_and_round"] for e in entries if e.get("bytes_per_client_and_round")]
        shown = [f"{_accuracy(entry)} | {figure}" for entry, figure in zip(entries, figures, strict=True)]
        out.add_row(row, *shown, f"{round(mean(sizes)):,}" if sizes else "-")
    return out


def _accuracy(entry: dict[str, Any]) -> str:
    if entry.get("mean") is None:
        return "-"
    seeds, clients = entry["sd_over_seeds"], entry["sd_over_clients"]
    return (
        f"{entry['mean']:.1f}"
        + (f" ± {seeds:.1f}" if seeds is not None else "")
        + (f" \\[{clients:.1f}]" if clients is not None else "")
    )

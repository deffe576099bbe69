"""The cells of the paper's tables: their settings at each scale, and the paper's figures.

`full` is exactly the paper's setting (GPUs). `workstation` is the scale of docs/results.md: encoders that learn, in
minutes per cell on one core. `laptop` is smaller. `smoke` runs every cell in seconds on embedded digits instead of the
real data sets, to show that the code works.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...config import Config, load_config
from ...errors import ConfigError

TableName = Literal["table1", "table2", "table3", "table4"]
Scale = Literal["full", "workstation", "laptop", "smoke"]

HETERO, OURS = "Hetero-SSFL", "Hetero-SSFL, our defaults"
OURS_RAD = "Hetero-SSFL with RAD images, our defaults"
FEDSIMCLR = "FedSimCLR"
ALONE, ALONE_RAD = "local SSL, our defaults", "local SSL with RAD images, our defaults"

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
            settings += ["evaluation.untrained=false"]  # up to 100 probes more; the first column has that floor
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

"""The cells of the paper's tables: their settings at each scale, and what the paper reports; read from cells.toml."""

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...config import Config, load_config
from ...errors import ConfigError

TableName = Literal["table1", "table2", "table3", "table4"]
Scale = Literal["full", "workstation", "laptop", "smoke"]

HETERO, FEDSIMCLR = "Hetero-SSFL", "FedSimCLR"
OURS, OURS_RAD = "Hetero-SSFL, our defaults", "Hetero-SSFL with RAD images, our defaults"
ALONE, ALONE_RAD = "local SSL, our defaults", "local SSL with RAD images, our defaults"
OUR_ROWS = (OURS, OURS_RAD, ALONE, ALONE_RAD)

_DATA: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("cells.toml").read_text())
SCALES, CHOSEN, ROW_SETTINGS, WORKSTATION = (_DATA[key] for key in ("scales", "chosen", "rows", "workstation"))
TITLES: dict[str, str] = {name: table["title"] for name, table in _DATA["tables"].items()}
COLUMNS: dict[str, list[str]] = {name: table["columns"] for name, table in _DATA["tables"].items()}
REPORTED: dict[str, dict[str, list[str]]] = {name: table["reported"] for name, table in _DATA["tables"].items()}


@dataclass(frozen=True)
class Cell:
    table: str
    row: str
    column: str
    reported: str  # the paper's accuracy

    @property
    def name(self) -> str:
        return f"{self.column}/{self.row}"

    @property
    def source(self) -> tuple[str, str]:
        """The table and column whose run this cell shows: both columns of Table 4 show one run, by architecture. Its
        federated rows are those of Table 1, and so is the first column of Table 3."""
        if self.table == "table4":
            return ("table1", "CIFAR-10") if self.row in REPORTED["table1"] else ("table4", "all")
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
        preset, models = SCALES[scale]["preset"], SCALES[scale]["models"]
        data = {"table3": "CIFAR-100", "table4": "CIFAR-10"}.get(self.table, self.column)
        mixed = self.row in (HETERO, *OUR_ROWS) or self.table == "table4"
        settings = [
            f"name={self.source[0]}",
            f"seed={seed}",
            f"clients.models={models if mixed else models[-1:]}",
            *(_DATA["data"][data] if scale != "smoke" else []),
            f"partition.kind={'iid' if self.table == 'table2' else 'classes'}",
            *([f"alignment.mu={_DATA['mu'][data]}"] if self.row == HETERO else []),
            *SCALES[scale]["settings"],
        ]
        count, per_round = map(int, self.column.strip(")").split(" (")) if self.table == "table3" else (5, 5)
        settings += [f"clients.count={count}", f"clients.per_round={per_round}"]
        if scale == "workstation" and count > per_round:  # as many epochs per client as with all clients in each round
            turns, base = count // per_round, load_config(preset)
            settings += [f"rounds={base.rounds * turns}", f"alignment.ramp_rounds={base.alignment.ramp_rounds * turns}"]
            settings += WORKSTATION["turns"][self.column]
        return load_config(preset, [*settings, *_recipe(scale, self.row, chosen), *ROW_SETTINGS[self.row], *overrides])


def _recipe(scale: str, row: str, chosen: bool) -> list[str]:
    """Return what the preset of the scale does not say: settings of other methods than ours at scale `workstation`,
    and our defaults at full scale, where preset `paper` replaces them."""
    if scale == "workstation" and row not in OUR_ROWS:
        published = [] if row == FEDSIMCLR else WORKSTATION["as_published"]
        return [*published, *(CHOSEN.get(row.removesuffix(" with RAD images"), []) if chosen else [])]
    if scale != "full" or row not in OUR_ROWS:
        return []
    keys = ("layer", "row_normalize", "power", "augment_rad", "mu", "distance", "ten_crop")
    ours = Config().alignment.model_dump(mode="json", include=set(keys))
    return [f"alignment.{key}={str(ours[key]).lower()}" for key in keys]


def cells_of(table: TableName, only: str | None = None) -> list[Cell]:
    """Return all cells of a table, or only those of one `column/row`, row or column."""
    cells = [
        Cell(table, row, column, reported)
        for row, values in REPORTED[table].items()
        for column, reported in zip(COLUMNS[table], values, strict=True)
    ]
    chosen = [cell for cell in cells if only is None or only in (cell.name, cell.row, cell.column)]
    if not chosen:
        near = difflib.get_close_matches(str(only), [cell.name for cell in cells], n=1)
        hint = f"the nearest is '{near[0]}'" if near else f"expected a form such as '{cells[0].name}'"
        raise ConfigError(f"{table} has no cell '{only}': {hint}.")
    return chosen

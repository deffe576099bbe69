"""The paper's tables at scale `workstation`, from the figures kept below results/, as they stand in results/tables.md.

    python experiments/tables.py                             # print them
    python experiments/tables.py --write results/tables.md   # replace them on the page, between its two marks

`make tables` runs what is missing; columns without a run are left out. A cell is the mean over n seeds ± its deviation:
of the global model (g) where a method has one, otherwise of the mean over the clients' own models.
"""

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import mean
from typing import get_args

import trials
from trials import markdown, write_to_page

from hetero_ssfl.studies.paper.cells import (
    ALONE,
    ALONE_RAD,
    COLUMNS,
    FEDSIMCLR,
    HETERO,
    OURS,
    OURS_RAD,
    REPORTED,
    Cell,
    TableName,
    cells_of,
)
from hetero_ssfl.studies.paper.scores import GLOBAL, RunScore, kept_runs, score

RESULTS = trials.RESULTS

TITLES = {
    "table1": "Table 1, classes apart",
    "table2": "Table 2, all classes at every client",
    "table3": "Table 3, CIFAR-100, number of clients (per round)",
    "table4": "Table 4, CIFAR-10, by encoder: ResNet-8 (small) and ResNet-14 (large)",
}

# What the tables are read for: a method against its control.
COMPARISONS = [(OURS, ALONE), (OURS_RAD, ALONE_RAD), (OURS, FEDSIMCLR), (HETERO, "FedEMA"), (HETERO, "local SSL")]


@cache
def runs_below(results: Path, cell: Cell) -> list[RunScore]:
    return kept_runs(results, cell, "workstation")


def runs_of(cell: Cell) -> list[RunScore]:
    """Return the kept runs of a cell by seed. Each file is read once: the comparison of its settings takes time."""
    return runs_below(RESULTS, cell)


def by_seed(cell: Cell, metric: str) -> dict[int, float]:
    """Return the accuracy of a cell for each seed."""
    return {run.seed: score(cell, [run], metric)["mean"] for run in runs_of(cell)}


def large_by_seed(cell: Cell, metric: str) -> dict[int, float]:
    """Return the same for ResNet-14 clients only: the averaging rows have no others, our rows have every second one."""
    found = {}
    for run in runs_of(cell):
        trained = [name for name in list(run.clients)[1::2] if name not in run.never_trained]
        found[run.seed] = run.shared.get(metric) or mean(run.clients[name][metric] for name in trained)
    return found


def accuracy(cell: Cell, metric: str, most_seeds: int) -> str:
    entry = score(cell, runs_of(cell), metric)
    if entry["mean"] is None:
        return "-"
    text = f"{entry['mean']:.1f}"
    if entry["sd_over_seeds"] is not None:
        text += f" ± {entry['sd_over_seeds']:.1f}"
    text += " g" if entry["of"] == GLOBAL else ""
    if entry["classifier_mean"] is not None and metric == "linear_all":
        text += f" (own classifier {entry['classifier_mean']:.1f})"
    if entry["seeds"] < most_seeds:
        text += f" (n = {entry['seeds']})"
    if count := entry["never_trained_clients"]:
        text += f" ({count} {'client' if count == 1 else 'clients'} never trained)"
    return f"{text} !" if entry["lost"] else text


def untrained(table: TableName, column: str, metric: str) -> str:
    """Return the range over the rows of a column, whose encoders differ."""
    cells = cells_of(table, column)
    entries = [score(cell, runs_of(cell), metric) for cell in cells]
    values = [entry["untrained_mean"] for entry in entries if entry["untrained_mean"] is not None]
    return f"{min(values):.1f} to {max(values):.1f}" if values else "-"


def most_seeds(table: TableName, column: str) -> int:
    return max(len(runs_of(cell)) for cell in cells_of(table, column))


def table_lines(table: TableName, metric: str) -> Iterator[str]:
    columns = {column: n for column in COLUMNS[table] if (n := most_seeds(table, column))}
    rows = [["untrained encoders", *(untrained(table, column, metric) for column in columns)]]
    for row in REPORTED[table]:
        cells = [(cells_of(table, f"{column}/{row}")[0], n) for column, n in columns.items()]
        rows.append([row, *(accuracy(cell, metric, n) for cell, n in cells)])
    yield from markdown(["method", *(f"{column}, n = {n}" for column, n in columns.items())], rows)


def comparison_lines() -> Iterator[str]:
    """One row per comparison and column: the mean difference over common seeds, with the smallest and the largest."""
    yield "| | column | linear probe | kNN | ResNet-14 clients: linear probe | kNN | seeds |"
    yield "|---|---|---|---|---|---|---|"
    for table in get_args(TableName):
        for row, control in COMPARISONS:
            if not {row, control} <= REPORTED[table].keys():
                continue
            for column in COLUMNS[table]:
                if table == "table3" and column == "5 (5)":  # the same runs as in Table 1
                    continue
                first, second = (cells_of(table, f"{column}/{name}")[0] for name in (row, control))
                seeds = sorted(by_seed(first, "linear_all").keys() & by_seed(second, "linear_all").keys())
                cells = []
                for of in (by_seed, large_by_seed):
                    for metric in ("linear_all", "knn_all"):
                        one, other = of(first, metric), of(second, metric)
                        gains = [one[seed] - other[seed] for seed in seeds]
                        cells.append(f"{mean(gains):+.1f} ({min(gains):+.1f} to {max(gains):+.1f})" if gains else "-")
                if table == "table4":  # its columns are the encoders
                    cells[2:] = ["-", "-"]
                if seeds:
                    number = table.removeprefix("table")
                    yield f"| {row} - {control} | {number}: {column} | {' | '.join(cells)} | {len(seeds)} |"


def page_lines() -> Iterator[str]:
    for table in get_args(TableName):
        for metric, name in (("linear_all", "linear probe"), ("knn_all", "kNN")):
            if any(most_seeds(table, c) for c in COLUMNS[table]) and (metric == "linear_all" or table == "table1"):
                yield from ["", f"{TITLES[table]}: {name}", "", *table_lines(table, metric)]
    yield from ["", "Differences for the same seed, mean (smallest to largest):", "", *comparison_lines(), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="replace the tables on this page")
    arguments = parser.parse_args()
    text = "\n".join(page_lines())
    if not arguments.write:
        print(text)
        return
    write_to_page(arguments.write, "experiments/tables.py", text)


if __name__ == "__main__":
    main()

"""A table for people: our figure and the paper's figure in each cell."""

from statistics import mean
from typing import Any

from rich.table import Table

from ...report.tables import range_of, table_of
from .cells import COLUMNS, REPORTED, TITLES, Scale, TableName
from .scores import GLOBAL

UNTRAINED = "untrained encoders of these rows"


def paper_table(table: TableName, scores: list[dict[str, Any]], scale: Scale) -> Table:
    notes = []
    if any(s.get("of") == GLOBAL for s in scores):
        notes.append("g: global model, with the clients' own models in brackets")
    if any(s.get("lost") for s in scores):
        notes.append("!: replies, clients or whole runs were lost")
    real = scale != "smoke"  # digits have no place beside the paper's figures
    title = (
        f"{TITLES[table]}, scale {scale}{'' if real else '; every column is trained on digits'}. Test accuracy "
        f"(%, {scores[0]['metric']}), last round: mean ± deviation over seeds \\[deviation over clients]"
        f"{' | in the paper' if real else ''}"
    )
    names = [column if real else f"digits ({column})" for column in COLUMNS[table]]
    heads = (f"{name}{_seeds(column, scores)}" for name, column in zip(names, COLUMNS[table], strict=True))
    head = ["method", *heads, "bytes per client\nand round"]
    untrained, rows, by_cell = [], [], {entry["cell"]: entry for entry in scores}
    for name, values in baselines(scores).items():
        ranges = [f"{range_of(values[c])}{' | -' if real else ''}" if c in values else "-" for c in COLUMNS[table]]
        untrained.append([name, *ranges, "-"])
    for row, reported in REPORTED[table].items():
        entries = [by_cell.get(f"{column}/{row}", {}) for column in COLUMNS[table]]
        sizes = [size for entry in entries if (size := entry.get("bytes_per_client_and_round"))]
        shown = [
            f"{_accuracy(entry)} | {paper}" if real else _accuracy(entry)
            for entry, paper in zip(entries, reported, strict=True)
        ]
        rows.append([row, *shown, f"{round(mean(sizes)):,}" if sizes else "-"])
    return table_of(title, head, untrained, rows, caption="; ".join(notes) or None)


def baselines(scores: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return by name and column what the cells reach without training: floors, and the untrained encoders."""
    found: dict[str, dict[str, list[float]]] = {}
    for entry in scores:
        untrained = {UNTRAINED: entry.get("untrained_mean")}
        for name, value in {**entry.get("floors", {}), **untrained}.items():
            if value is not None:
                found.setdefault(name, {}).setdefault(_column(entry), []).append(value)
    return dict(sorted(found.items(), key=lambda item: item[0] == UNTRAINED))


def _column(entry: dict[str, Any]) -> str:
    return str(entry["cell"]).partition("/")[0]


def _seeds(column: str, scores: list[dict[str, Any]]) -> str:
    counts = {entry["seeds"] for entry in scores if _column(entry) == column and entry.get("seeds")}
    return f"\n{range_of(list(counts), 'd')} seed{'' if counts == {1} else 's'}" if counts else ""


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

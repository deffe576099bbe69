"""A table for people: our figure and the paper's figure in each cell."""

from statistics import mean
from typing import Any

from rich.table import Table

from .cells import COLUMNS, REPORTED, TITLES, Scale, TableName
from .scores import GLOBAL


def paper_table(table: TableName, scores: list[dict[str, Any]], scale: Scale) -> Table:
    """Build a table with our figure and the paper's figure in each cell."""
    stand_in = "; digits instead of the real data sets" if scale == "smoke" else ""
    notes = [
        "g: global model, with the clients' own models in brackets"
        if any(s.get("of") == GLOBAL for s in scores)
        else "",
        "!: replies, clients or whole runs were lost" if any(s.get("lost") for s in scores) else "",
    ]
    out = Table(
        title=f"{TITLES[table]}, scale {scale}{stand_in}. Test accuracy (%, {scores[0]['metric']}), last round: "
        "mean ± deviation over seeds \\[deviation over clients] | in the paper",
        caption="; ".join(filter(None, notes)) or None,
    )
    out.add_column("method")
    for column in COLUMNS[table]:
        out.add_column(f"{column}{_seeds(column, scores)}", justify="right")
    out.add_column("bytes per client\nand round", justify="right")
    by_cell = {entry["cell"]: entry for entry in scores}
    for row, reported in REPORTED[table].items():
        entries = [by_cell.get(f"{column}/{row}", {}) for column in COLUMNS[table]]
        sizes = [e["bytes_per_client_and_round"] for e in entries if e.get("bytes_per_client_and_round")]
        shown = [f"{_accuracy(entry)} | {paper}" for entry, paper in zip(entries, reported, strict=True)]
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

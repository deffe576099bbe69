"""`make demo`: five different encoders on embedded digits, alone and together (the paper's Table 4 in miniature).

Three runs with the same initial weights: each client alone; alone with the RAD images as extra unlabeled data, as a
fair control; and together. All are probed in the same way on the test images, after the last round, with few labels.
"""

from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from ..config import load_config
from ..federation.participants import open_site
from ..report import plots
from ..report.tables import Result, of_metric, spread, table_of
from ..runs.folder import RunFolder
from ..terminal import Console
from ..use.encoders import mutual_cka_of
from .grid import Row, run_rows

METRIC = "linear_all"
METRICS = {METRIC: "linear probe", "knn_all": "nearest neighbours"}
ARMS = {
    "alone": ["method=local", "rad.in_ssl=false"],
    "alone with RAD images": ["method=local", "rad.in_ssl=true"],
    "together": [],
}


def run_demo(folder: Path, console: Console, overrides: list[str], quiet: bool = False) -> dict[str, Result]:
    configs = {arm: load_config("demo", [*overrides, *settings]) for arm, settings in ARMS.items()}
    rows = [Row(arm, config, folder / arm.replace(" ", "-")) for arm, config in configs.items()]
    run_rows(rows, console, quiet)
    return {row.name: Result.read(RunFolder(row.folder)) for row in rows}


def demo_rows(results: dict[str, Result]) -> list[dict[str, Any]]:
    together, rows = results["together"], []
    for client in together.results["clients"]:
        model, untrained = together.model(client), together.results["untrained"][client][METRIC]
        about = {"client": client, "encoder": model["encoder"].partition("(")[0], "parameters": model["parameters"]}
        scores = {arm: result.score(client, METRIC) for arm, result in results.items()}
        rows.append({**about, "holds": together.holdings(client), "untrained": untrained, **scores})
    return rows


def demo_table(results: dict[str, Result]) -> Table:
    config, rows, cells = results["together"].config, demo_rows(results), []
    gains = [row["together"] - row["alone"] for row in rows]
    for row, gain in zip(rows, gains, strict=True):
        about = [row["client"], row["encoder"], row["holds"], f"{row['parameters']:,}"]
        scores = [f"{row[key]:.1f}" for key in ("untrained", *ARMS)]
        cells.append([*about, *scores, f"[{'green' if gain > 0 else 'red'}]{gain:+.1f}[/]"])
    means = [spread(row[key] for row in rows) for key in ("untrained", *ARMS)]
    title = (
        f"digits, {config.clients.count} clients with 2 classes each: accuracy on test images of all 10 classes (%),\n"
        f"linear probe on the frozen encoder with {config.evaluation.labels_per_class} labels per class"
    )
    arms = ("untrained", "alone", "alone with\nRAD images", "together", "difference\n(to alone)")
    head = ["client", "encoder", "holds", "parameters", *arms]
    total = ["mean ± sd", "over clients", "", "", *means, f"{mean(gains):+.1f}"]
    return table_of(title, head, cells, [total], texts=3)


def summary_rows(results: dict[str, Result]) -> list[dict[str, Any]]:
    """Return the means over clients of both probes: features that nobody trained, then the arms."""
    together = results["together"]
    scores = {floor: {m: together.scores(m, floor) for m in METRICS} for floor in together.floors}
    untrained = together.results["untrained"]
    scores["untrained encoders"] = {m: list(of_metric(untrained, m).values()) for m in METRICS}
    scores |= {arm: {m: result.scores(m) for m in METRICS} for arm, result in results.items()}
    return [{"features": name, **{m: mean(values) for m, values in row.items()}} for name, row in scores.items()]


def summary_table(results: dict[str, Result]) -> Table:
    rows = [[row["features"], *[f"{row[metric]:.1f}" for metric in METRICS]] for row in summary_rows(results)]
    floors = len(results["together"].floors)
    parts = (rows[:floors], rows[floors : floors + 1], rows[floors + 1 :])
    title = "mean over clients (%); the first rows are features that nobody trained"
    return table_of(title, ["features", *METRICS.values()], *parts)


def draw_demo(results: dict[str, Result], path: Path) -> None:
    figure, axes = plots.subplots(2, 3, figsize=(14, 8.5))
    plots.curves(axes[0, 0], {arm: result.folder.events() for arm, result in results.items()}, METRIC)
    axes[0, 0].set_title("alone and together, round by round (band: lowest to highest client)", fontsize=9)
    together = results["together"]
    plots.holdings(axes[0, 1], together.facts["holdings"], together.facts["classes"])
    axes[0, 1].set_title("images of each class", fontsize=9)
    titles = {arm: f"mutual CKA after training, {arm}" for arm in results}
    panels = [(axes[0, 2], together, False, "mutual CKA on the RAD, untrained")]
    panels += [(axis, results[arm], True, title) for axis, (arm, title) in zip(axes[1], titles.items(), strict=True)]
    for axis, result, trained, title in panels:
        clients, mutual = mutual_cka_of(result.folder, open_site(result.folder), trained)
        names = [result.model(client)["encoder"].partition("(")[0] for client in clients]
        plots.heat_map(axis, mutual, title, names)
    figure.tight_layout()
    plots.save(figure, path)

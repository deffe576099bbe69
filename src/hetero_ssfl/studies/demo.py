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
from ..report.tables import Result, spread
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
    """Run or continue the three arms."""
    rows = [
        Row(arm, load_config("demo", [*overrides, *settings]), folder / arm.replace(" ", "-"))
        for arm, settings in ARMS.items()
    ]
    run_rows(rows, console, quiet)
    return {row.name: Result.read(RunFolder(row.folder)) for row in rows}


def demo_rows(results: dict[str, Result]) -> list[dict[str, Any]]:
    together = results["together"]
    return [
        {
            "client": client,
            "encoder": together.model(client)["encoder"].partition("(")[0],
            "parameters": together.model(client)["parameters"],
            "holds": together.holdings(client),
            "untrained": together.results["untrained"][client][METRIC],
            **{arm: result.score(client, METRIC) for arm, result in results.items()},
        }
        for client in together.results["clients"]
    ]


def demo_table(results: dict[str, Result]) -> Table:
    config, rows = results["together"].config, demo_rows(results)
    table = Table(
        title=f"digits, {config.clients.count} clients with 2 classes each: accuracy on test images of all 10 classes "
        f"(%),\nlinear probe on the frozen encoder with {config.evaluation.labels_per_class} labels per class"
    )
    for heading in ("client", "encoder", "holds"):
        table.add_column(heading)
    for heading in ("parameters", "untrained", "alone", "alone with\nRAD images", "together", "difference\n(to alone)"):
        table.add_column(heading, justify="right")
    for row in rows:
        gain = row["together"] - row["alone"]
        table.add_row(
            *[row[key] for key in ("client", "encoder", "holds")],
            f"{row['parameters']:,}",
            *[f"{row[key]:.1f}" for key in ("untrained", *ARMS)],
            f"[{'green' if gain > 0 else 'red'}]{gain:+.1f}[/]",
        )
    table.add_section()
    means = [spread([row[key] for row in rows]) for key in ("untrained", *ARMS)]
    gain = mean(row["together"] - row["alone"] for row in rows)
    table.add_row("mean ± sd", "over clients", "", "", *means, f"{gain:+.1f}")
    return table


def summary_rows(results: dict[str, Result]) -> list[dict[str, Any]]:
    """Return the means over clients of both probes: features that nobody trained, then the arms."""
    together = results["together"]
    scores = {floor: {m: together.floor(floor, m) for m in METRICS} for floor in together.floors}
    untrained = together.results["untrained"].values()
    scores["untrained encoders"] = {m: [client[m] for client in untrained] for m in METRICS}
    scores |= {arm: {m: result.scores(m) for m in METRICS} for arm, result in results.items()}
    return [{"features": name, **{m: mean(values) for m, values in row.items()}} for name, row in scores.items()]


def summary_table(results: dict[str, Result]) -> Table:
    table = Table(title="mean over clients (%); the first rows are features that nobody trained")
    table.add_column("features")
    for heading in METRICS.values():
        table.add_column(heading, justify="right")
    for row in summary_rows(results):
        if row["features"] in ("untrained encoders", "alone"):
            table.add_section()
        table.add_row(row["features"], *[f"{row[metric]:.1f}" for metric in METRICS])
    return table


def draw_demo(results: dict[str, Result], path: Path) -> None:
    figure, axes = plots.subplots(2, 3, figsize=(14, 8.5))
    plots.curves(axes[0, 0], {arm: result.folder.events() for arm, result in results.items()}, METRIC)
    axes[0, 0].set_title("alone and together, round by round (band: lowest to highest client)", fontsize=9)
    together = results["together"]
    plots.holdings(axes[0, 1], together.facts["holdings"], together.facts["classes"])
    titles = {arm: f"mutual CKA after training, {arm}" for arm in results}
    panels = [(axes[0, 2], together, False, "mutual CKA on the RAD, untrained")]
    panels += [(axis, results[arm], True, title) for axis, (arm, title) in zip(axes[1], titles.items(), strict=True)]
    for axis, result, trained, title in panels:
        clients, mutual = mutual_cka_of(result.folder, open_site(result.folder), trained)
        names = [result.model(client)["encoder"].partition("(")[0] for client in clients]
        plots.heat_map(axis, mutual, title, names)
    figure.tight_layout()
    plots.save(figure, path)

"""`make demo`: five different encoders on embedded digits, alone and together (the paper's Table 4 in miniature).

Three runs with the same initial weights: each client alone; alone with the RAD images as extra unlabeled data, as a
fair control; and together. All are probed in the same way on the test images, after the last round, with few labels.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from ..config import load_config
from ..federation.participants import open_site
from ..federation.start import start
from ..report import plots
from ..report.progress import RunView
from ..report.tables import Result, spread
from ..terminal import Console
from ..use.encoders import mutual_cka_of

METRIC = "linear_all"
ARMS = {
    "alone": ["method=local", "rad.in_ssl=false"],
    "alone with RAD images": ["method=local", "rad.in_ssl=true"],
    "together": [],
}


@dataclass(frozen=True)
class Demo:
    results: dict[str, Result]
    picture: Path

    def rows(self) -> list[dict[str, Any]]:
        together = self.results["together"]
        return [
            {
                "client": client,
                "encoder": together.model(client)["encoder"].partition("(")[0],
                "parameters": together.model(client)["parameters"],
                "holds": together.holdings(client),
                "untrained": together.results["untrained"][client][METRIC],
                **{arm: result.score(client, METRIC) for arm, result in self.results.items()},
            }
            for client in together.results["clients"]
        ]


def run_demo(folder: Path, console: Console, overrides: list[str], quiet: bool = False) -> Demo:
    """Run or continue the three arms and draw the picture."""
    results = {}
    for arm, settings in ARMS.items():
        config = load_config("demo", [*overrides, *settings])
        with RunView(console, arm, quiet) as view:
            results[arm] = Result.read(start(config, folder / arm.replace(" ", "-"), view))
    picture = folder / "demo.png"
    _draw(results, picture)
    return Demo(results, picture)


def demo_table(demo: Demo) -> Table:
    config = demo.results["together"].config
    labels = config.evaluation.labels_per_class
    table = Table(
        title=f"digits, {config.clients.count} clients with 2 classes each: accuracy on test images of all 10 classes "
        f"(%),\nlinear probe on the frozen encoder with {labels} labels per class"
    )
    for heading in ("client", "encoder", "holds"):
        table.add_column(heading)
    for heading in ("parameters", "untrained", "alone", "alone with\nRAD images", "together", "difference\n(to alone)"):
        table.add_column(heading, justify="right")
    rows = demo.rows()
    for row in rows:
        gain = row["together"] - row["alone"]
        table.add_row(
            *[row[key] for key in ("client", "encoder", "holds")],
            f"{row['parameters']:,}",
            *[f"{row[key]:.1f}" for key in ("untrained", *ARMS)],
            f"[{'green' if gain > 0 else 'red'}]{gain:+.1f}[/]",
        )
    table.add_section()
    gain = mean(row["together"] - row["alone"] for row in rows)
    table.add_row(
        "mean ± sd",
        "over clients",
        "",
        "",
        *[spread([r[key] for r in rows]) for key in ("untrained", *ARMS)],
        f"{gain:+.1f}",
    )
    return table


def _draw(results: dict[str, Result], path: Path) -> None:
    figure, axes = plots.subplots(2, 3, figsize=(14, 8.5))
    plots.curves(axes[0, 0], {arm: r.folder.events() for arm, r in results.items()}, METRIC)
    axes[0, 0].set_title("alone and together, round by round (band: lowest to highest client)", fontsize=9)
    together = results["together"]
    plots.holdings(axes[0, 1], together.facts["holdings"], together.facts["classes"])
    clients, untrained = mutual_cka_of(together.folder, open_site(together.folder), trained=False)
    names = [together.model(c)["encoder"].partition("(")[0] for c in clients]
    plots.heat_map(axes[0, 2], untrained, "mutual CKA on the RAD, untrained", names)
    for axis, (arm, result) in zip(axes[1], results.items(), strict=True):
        plots.heat_map(
            axis,
            mutual_cka_of(result.folder, open_site(result.folder), trained=True)[1],
            f"mutual CKA after training, {arm}",
            names,
        )
    figure.tight_layout()
    plots.save(figure, path)

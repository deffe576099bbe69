"""What features reach that nobody trained, with the probes, labels and test images of a preset: README and results.md.

    HETERO_SSFL_DATA=... python experiments/floors.py --seeds 3    # a minute on one core
    python experiments/floors.py --table                           # print what is kept, compute nothing

Raw pixels, and two random convolutions with 2x2 average pooling, each at the widths of the preset's encoders (PCA of
the labeled images) and at their own width.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import arms
import trials
from trials import markdown, write_result

from hetero_ssfl.config import Config, load_config
from hetero_ssfl.data import load_images, split_training_images
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.learning.floors import CONVOLUTIONS, FULL_WIDTH, PIXELS, floor_encoder
from hetero_ssfl.learning.probes import Labeled, probe
from hetero_ssfl.report import plots
from hetero_ssfl.runs.environment import environment

RESULTS = trials.RESULTS / "floors.json"
PRESET = "cifar10-workstation"
KINDS = (PIXELS, CONVOLUTIONS)
WIDTHS = (64, 128, 0)
"""Widths to which PCA reduces the features; 0 for all of them."""


def probes_of(config: Config) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the test accuracies of every floor."""
    images, test = load_images(config.data, "train"), load_images(config.data, "test")
    train = images.subset(split_training_images(config, images).pool())
    assert train.labels is not None
    assert test.labels is not None
    for kind in KINDS:
        for width in WIDTHS:
            encoder = floor_encoder(kind if width else kind + FULL_WIDTH, train.pixels, width, config.seed)
            fit = Labeled(extract_features(encoder, train.pixels), train.labels)
            held_out = Labeled(extract_features(encoder, test.pixels), test.labels)
            name = f"{kind}, {width} features" if width else f"{kind}, all {fit.x.shape[1]} features"
            yield name, probe(fit, held_out, config.evaluation, config.seed)


def table_lines() -> Iterator[str]:
    """One Markdown row per preset and floor: means over seeds."""
    rows = [
        [preset, name, str(len(seeds)), *(f"{mean(seed[probe] for seed in seeds):.1f}" for probe in ("linear", "knn"))]
        for preset, floors in json.loads(RESULTS.read_text())["presets"].items()
        for name, seeds in floors.items()
    ]
    yield from markdown(["preset", "features", "seeds", "linear probe", "kNN"], rows)


def floor(preset: str, probe: str, kind: str = "") -> float:
    """Return the best mean over seeds at the widths of the preset's encoders, of one kind of features or of all."""
    floors = json.loads(RESULTS.read_text())["presets"][preset]
    wide = {name: seeds for name, seeds in floors.items() if ", all " in name}
    narrow = {name: seeds for name, seeds in floors.items() if name not in wide}
    return max(mean(seed[probe] for seed in seeds) for name, seeds in (narrow or wide).items() if kind in name)


def arm_mean(arm: str, metric: str) -> float:
    """Return the mean over seeds and clients of an arm of experiments/arms.py."""
    return mean(value for values in arms.metric_by_seed(arms.kept(arm), metric).values() for value in values)


def draw(path: Path) -> None:
    """Both kinds of floor beside the arms: means over seeds, and over clients."""
    labels = {"alone": "alone", "alone with RAD images": "alone, the RAD as extra data", "together": "together"}
    labels |= {"central, as long as together": "one model with all images"}
    figure, panels = plots.subplots(1, 2, figsize=(7, 2.1))
    figure.set_layout_engine("constrained")
    for axes, key, title in zip(panels, ("linear", "knn"), ("linear probe", "nearest neighbours"), strict=True):
        rows = {kind: floor("cifar10-workstation", key, kind) for kind in KINDS}
        for arm, label in labels.items():
            rows[label] = arm_mean(arm, f"{key}_all")
        for place, (name, value) in enumerate(rows.items()):
            axes.plot(value, place, "o", color="tab:blue" if name == "together" else "tab:gray", markersize=7)
            axes.annotate(f"{value:.1f}", (value, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
        axes.axvline(max(rows[kind] for kind in KINDS), color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel=f"{title}, accuracy (%)", xlim=(35, 51), ylim=(len(rows) - 0.4, -0.6))
        axes.set_yticks(range(len(rows)), list(rows) if axes is panels[0] else [""] * len(rows), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--table", action="store_true", help="compute nothing")
    parser.add_argument("--figure", type=Path, help="also draw the floors beside the arms to this file")
    arguments = parser.parse_args()
    if not arguments.table:
        presets: dict[str, dict[str, list[dict[str, float]]]] = {}
        for seed in range(arguments.seeds):
            for name, scores in probes_of(load_config(PRESET, [f"seed={seed}"])):
                presets.setdefault(PRESET, {}).setdefault(name, []).append(scores)
        command = f"python experiments/floors.py --seeds {arguments.seeds}"
        result = {"command": command, "commit": environment()["commit"], "presets": presets}
        write_result(RESULTS, result)
    print("\n".join(table_lines()))
    if arguments.figure:
        draw(arguments.figure)


if __name__ == "__main__":
    main()

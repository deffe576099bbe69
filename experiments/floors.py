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
import torch
import trials
from torch import Tensor, nn
from trials import markdown, write_result

from hetero_ssfl.config import Config, load_config
from hetero_ssfl.data import MEAN, STD, Images, load_images, split_training_images
from hetero_ssfl.learning.probes import Labeled, few_labels, probe
from hetero_ssfl.report import plots
from hetero_ssfl.runs.environment import environment

RESULTS = trials.RESULTS / "floors.json"
KINDS = ("raw pixels", "untrained convolutions")
WIDTHS = {"cifar10-workstation": (64, 128, None), "demo": (None,)}
"""Widths to which PCA reduces the features; None for all of them."""


def encoders(channels: int, seed: int) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    convolutions = nn.Sequential(
        nn.Conv2d(channels, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip
    return dict(zip(KINDS, (nn.Flatten(), convolutions), strict=True))


def probes_of(config: Config) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the test accuracies of every floor."""
    images, test = load_images(config.data, "train"), load_images(config.data, "test")
    train = images.subset(split_training_images(config, images).pool())
    assert train.labels is not None
    train = train.subset(few_labels(train.labels, config.evaluation.labels_per_class, config.seed))
    for name, encoder in encoders(train.pixels.shape[1], config.seed).items():
        fit, held_out = (labeled(encoder, part) for part in (train, test))
        for width in WIDTHS[config.name]:
            if width is None:
                yield f"{name}, all {fit.x.shape[1]} features", probe(fit, held_out, config.evaluation, config.seed)
            else:
                axes, centre = principal_axes(fit.x, width), fit.x.mean(0)
                small, small_test = (Labeled((part.x - centre) @ axes, part.y) for part in (fit, held_out))
                yield f"{name}, {width} features", probe(small, small_test, config.evaluation, config.seed)


def labeled(encoder: nn.Module, images: Images) -> Labeled:
    assert images.labels is not None
    with torch.no_grad():
        parts = [encoder((pixels / 255 - MEAN) / STD) for pixels in images.pixels.split(1000)]
    return Labeled(torch.cat(parts), images.labels)


def principal_axes(x: Tensor, width: int) -> Tensor:
    return torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh[:width].T


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
        for preset in WIDTHS:
            for seed in range(arguments.seeds):
                for name, scores in probes_of(load_config(preset, [f"seed={seed}"])):
                    presets.setdefault(preset, {}).setdefault(name, []).append(scores)
        command = f"python experiments/floors.py --seeds {arguments.seeds}"
        result = {"command": command, "commit": environment()["commit"], "presets": presets}
        write_result(RESULTS, result)
    print("\n".join(table_lines()))
    if arguments.figure:
        draw(arguments.figure)


if __name__ == "__main__":
    main()

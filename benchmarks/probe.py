"""The linear probe, compared with the same classifier trained from a torch DataLoader.

20,000 x 512 synthetic features of 10 classes, 100 epochs of Adam (lr 0.003, batch 512), one torch thread. The loader is
the usual one: `DataLoader(TensorDataset(x, y), batch, shuffle=True)` with other arguments at their defaults. Both sides
get standardised features and must reach the same test accuracy within 0.2 points. Times are medians of CPU seconds of
alternating runs.

    python benchmarks/probe.py
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from measuring import Row, alternate, cpu_seconds, medians, publish
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hetero_ssfl.config import EvaluationConfig
from hetero_ssfl.learning.probes import Labeled, linear_probe
from hetero_ssfl.seeding import global_seed, rng_for

CLASSES, WIDTH = 10, 512
OVERLAP = 0.12  # scale of the class centres, in standard deviations: linear classifiers get about 80 % right
CLOSE = 0.2  # points of accuracy


def features(count: int, split: str) -> Labeled:
    centres = OVERLAP * torch.randn(CLASSES, WIDTH, generator=rng_for(0, "centres"))
    rng = rng_for(0, split)
    labels = torch.randint(CLASSES, (count,), generator=rng)
    return Labeled(centres[labels] + torch.randn(count, WIDTH, generator=rng), labels)


def with_loader(train: Labeled, test_x: Tensor, config: EvaluationConfig, seed: int) -> Tensor:
    with global_seed(seed, "loader"):
        classifier = nn.Linear(train.x.shape[1], CLASSES)
        optimiser = torch.optim.Adam(classifier.parameters(), lr=config.lr)
        loader = DataLoader(TensorDataset(train.x, train.y), config.batch, shuffle=True)
        for _ in range(config.epochs):
            for x, y in loader:
                loss = F.cross_entropy(classifier(x), y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    with torch.no_grad():
        return classifier(test_x).argmax(1)


def bare_step(train: Labeled, config: EvaluationConfig) -> float:
    """Return the seconds of the minimum work of a step: fetch a batch, and two products (scores and gradient)."""
    weight, buffer = torch.randn(CLASSES, WIDTH), torch.empty(config.batch, WIDTH)
    order = torch.randperm(len(train.x)).split(config.batch)[:-1]

    def steps() -> None:
        for rows in order:
            batch = torch.index_select(train.x, 0, rows, out=buffer)
            torch.mm(torch.mm(weight, batch.T), batch)

    return min(cpu_seconds(steps) for _ in range(5)) / len(order)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two epochs, one repeat, without writing results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = EvaluationConfig(epochs=2 if options.quick else 100, standardize=False)
    train, test = features(20_000, "train"), features(20_000, "test")
    accuracy: dict[str, float] = {}

    def side(name: str, work: Callable[[Labeled, Tensor, EvaluationConfig, int], Tensor]) -> None:
        accuracy[name] = 100 * float((work(train, test.x, config, 0) == test.y).double().mean())

    sides = {
        "ours": partial(cpu_seconds, partial(side, "ours", linear_probe)),
        "loader": partial(cpu_seconds, partial(side, "loader", with_loader)),
    }
    taken = medians(alternate(sides, 1 if options.quick else options.repeats))
    bare = bare_step(train, config) * config.epochs * -(-len(train.x) // config.batch)
    note = (
        f"accuracy {accuracy['ours']:.2f} and {accuracy['loader']:.2f} %; fetching batches and two products alone "
        f"take {bare:.2f} s, so nothing can be more than {taken['loader'] / bare:.1f} times as fast"
    )
    what = f"linear probe, 20,000 x {WIDTH}, {config.epochs} epochs ({taken['ours']:.2f} s)"
    row = Row(
        what,
        f"DataLoader over a TensorDataset ({taken['loader']:.2f} s)",
        taken["loader"] / taken["ours"],
        10,
        note=note,
    )
    publish("probe", [row], {"seconds": taken, "bare_steps": bare, "accuracy": accuracy}, write=not options.quick)
    apart = abs(accuracy["ours"] - accuracy["loader"])
    if apart > CLOSE and not options.quick:
        print(f"accuracies are {apart:.2f} points apart, expected at most {CLOSE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

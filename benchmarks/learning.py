"""Accuracy per CPU minute: our recipe against lightly's recipe of SimCLR, on the same network and images.

    ours      `hetero_ssfl.learning.training.train` as preset `cifar10-workstation` sets it, in several lengths
    lightly   the recipe of lightly's CIFAR-10 benchmark: SGD 0.06 per 128 images, cosine, weight decay 5e-4, batch 512
              (for so few images also 128; the better one counts), temperature 0.5, its views without blur as PIL
              images in a DataLoader, channels last

Both train one ResNet-8 with a whitened first layer on the 2,500 images of clients and RAD, on one thread of the same
process. The ratio is the time of lightly's recipe divided by that of our shortest run that is at least as accurate with
nearest neighbours, on validation images. Probes are not timed.

    HETERO_SSFL_DATA=... python benchmarks/learning.py      # about half an hour
"""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from measuring import Row, cpu_seconds, publish
from per_image import TwoViews
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hetero_ssfl.config import Config, ViewsConfig, load_config
from hetero_ssfl.data.images import Images, load_images
from hetero_ssfl.data.splits import split_training_images
from hetero_ssfl.learning.encoders.whitening import fit_whitening
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.learning.learner import build_learner
from hetero_ssfl.learning.probes import Labeled, probe
from hetero_ssfl.learning.training import TrainingClient, train

ONE_MODEL = ["method=local", "clients.count=1", "partition.kind=iid", "evaluation.probes=['knn', 'linear']"]
ONE_MODEL += ["clients.models=['resnet8(width=20, stem=2, whiten=3, pool=2)']"]
# SimCLRTransform(input_size=32, gaussian_blur=0, cj_strength=0.5): crops from 8 % of the area
THEIR_VIEWS = ViewsConfig(crop=(0.08, 1.0), brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
Scores = dict[str, float]


class Scene:
    """The images of the preset, and the probe that both sides share."""

    def __init__(self, limit: int | None) -> None:
        self.config = load_config("cifar10-workstation", [*ONE_MODEL, *([f"data.limit={limit}"] if limit else [])])
        self.images: Images = load_images(self.config.data, "train")
        self.split = split_training_images(self.config, self.images)
        self.rad, own = self.images.pixels[self.split.rad], self.images.pixels[self.split.clients[0]]
        self.pixels = torch.cat([own, self.rad])

    def probed(self, encoder: nn.Module) -> Scores:
        assert self.images.labels is not None
        train_rows, test_rows = self.split.clients[0], self.split.validation
        sides = [
            Labeled(extract_features(encoder, self.images.pixels[rows]), self.images.labels[rows])
            for rows in (train_rows, test_rows)
        ]
        return probe(sides[0], sides[1], self.config.evaluation, self.config.seed)


def ours(scene: Scene, local_epochs: int) -> Scores:
    """Train for this many epochs in each round; return the CPU seconds and the accuracies."""
    config: Config = scene.config.model_copy(update={"local_epochs": local_epochs})
    rounds = range(1, config.rounds + 1)
    learner = build_learner(config.model_of(0), config.ssl, 3, 32, config.seed, "benchmark")
    fit_whitening(learner, scene.rad)
    client = TrainingClient("client", config, learner, scene.pixels, scene.rad[:0])
    taken = cpu_seconds(lambda: [train(client, number) for number in rounds])
    return {"epochs": local_epochs * config.rounds, "seconds": taken, **scene.probed(learner.encoder.eval())}


def lightly(scene: Scene, epochs: int, batch: int) -> Scores:
    config = scene.config
    learner = build_learner(config.model_of(0), config.ssl, 3, 32, config.seed, "benchmark")
    fit_whitening(learner, scene.rad)
    encoder = copy.deepcopy(learner.encoder).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    width = learner.projector[0].in_features
    assert isinstance(width, int)
    head = nn.Sequential(
        *(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()),
        *(nn.Linear(width, 128, bias=False), nn.BatchNorm1d(128)),
    )
    model = nn.Sequential(encoder, head).train()
    sgd = torch.optim.SGD(model.parameters(), lr=0.06 * batch / 128, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(TwoViews(scene.pixels, THEIR_VIEWS), batch, shuffle=True, drop_last=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, epochs)

    def epoch() -> None:
        for views in loader:
            z_1, z_2 = (F.normalize(model(view.contiguous(memory_format=torch.channels_last))) for view in views)
            loss = nt_xent(z_1, z_2)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        cosine.step()

    taken = sum(cpu_seconds(epoch) for _ in range(epochs))
    return {"epochs": epochs, "batch": batch, "seconds": taken, **scene.probed(encoder.eval())}


def nt_xent(z_1: Tensor, z_2: Tensor, temperature: float = 0.5) -> Tensor:
    z = torch.cat([z_1, z_2])
    similarity = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(z_1)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy per CPU minute against lightly's recipe.")
    parser.add_argument("--epochs", type=int, default=100, help="of lightly's recipe")
    parser.add_argument("--quick", action="store_true", help="two epochs of few images, without writing results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scene = Scene(2900 if options.quick else None)
    epochs = 2 if options.quick else options.epochs
    theirs = [lightly(scene, epochs, batch) for batch in (128, 512)]
    best = max(theirs, key=lambda scores: scores["knn"])
    runs = []
    for length in [1] if options.quick else (1, 2, 3, 4, 5, 6, 8, 10, 12, 16):
        runs.append(ours(scene, length))
        if runs[-1]["knn"] >= best["knn"]:
            break
    ratio = best["seconds"] / runs[-1]["seconds"] if runs[-1]["knn"] >= best["knn"] else 0.0
    note = f"{runs[-1]['knn']:.1f} % in {runs[-1]['seconds']:.0f} s, {best['knn']:.1f} % in {best['seconds']:.0f} s"
    row = Row("SimCLR to the same kNN, ResNet-8, CIFAR-10", "lightly's recipe, same network", ratio, 1.5, note=note)
    publish("learning", [row], {"ours": runs, "lightly": theirs}, not options.quick)


if __name__ == "__main__":
    main()

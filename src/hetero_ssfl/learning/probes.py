"""Probe the features of a frozen encoder with a linear classifier and nearest neighbours."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..config import EvaluationConfig
from ..seeding import global_seed, rng_for

Measure = Callable[[Tensor, Tensor], float]
"""Compares predicted with true classes."""

NEGLIGIBLE = 1e-3  # a deviation, relative to the largest, below which a component is noise


@dataclass(frozen=True)
class Labeled:
    """Features with their labels."""

    x: Tensor
    y: Tensor

    def only(self, classes: Tensor) -> "Labeled":
        rows = torch.isin(self.y, classes)
        return Labeled(self.x[rows], self.y[rows])


def accuracy(predicted: Tensor, truth: Tensor) -> float:
    """Return the percentage of correct predictions."""
    return 100 * float((predicted == truth).double().mean())


def balanced_accuracy(predicted: Tensor, truth: Tensor) -> float:
    """Return the mean over classes of the percentage of correct predictions, as a whole number.

    It does not depend on how many images a class has: whoever always predicts the same class gets 100 / classes.
    Rounding hides the denominators of the means, which are numbers of images.
    """
    accuracies = [(predicted[truth == label] == label).double().mean() for label in truth.unique()]
    return float(round(100 * float(torch.stack(accuracies).mean())))


def probe(
    train: Labeled, test: Labeled, config: EvaluationConfig, seed: int, measure: Measure = accuracy
) -> dict[str, float]:
    """Return the accuracy in percent of each probe in the config, or another measure of its predictions."""
    classes, train_y = train.y.unique(return_inverse=True)  # classes come from training labels, never from test labels
    fit = Labeled(train.x, train_y)
    predictions: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: linear_probe(fit, test.x, config, seed),
        "knn": lambda: knn_probe(fit, test.x, config.neighbours),
        "knn-flat": lambda: knn_probe(*flattened(fit, test.x), config.neighbours),
    }
    return {name: measure(classes[predict()], test.y) for name, predict in predictions.items() if name in config.probes}


def linear_probe(train: Labeled, test_x: Tensor, config: EvaluationConfig, seed: int) -> Tensor:
    """Return the classes predicted by a linear (or one-hidden-layer) classifier: Adam, cross-entropy, fixed epochs."""
    x = train.x
    if config.standardize:
        mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
        x, test_x = (x - mean) / std, (test_x - mean) / std
    classes = int(train.y.max()) + 1
    with global_seed(seed, "probe"):
        hidden = [nn.Linear(x.shape[1], config.hidden), nn.ReLU()] if config.hidden else []
        classifier = nn.Sequential(*hidden, nn.Linear(config.hidden or x.shape[1], classes))
    fit = _fit if config.hidden else _fit_linear
    fit(classifier, x, train.y, config, rng_for(seed, "probe order"))
    with torch.no_grad():
        predicted: Tensor = classifier(test_x).argmax(1)
    return predicted


def _fit(classifier: nn.Sequential, x: Tensor, y: Tensor, config: EvaluationConfig, rng: Generator) -> None:
    optimiser = torch.optim.Adam(classifier.parameters(), lr=config.lr)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(x), generator=rng).split(config.batch):
            # index_select copies whole rows several times as fast as x[rows] and gives the same bits.
            loss = F.cross_entropy(classifier(x.index_select(0, rows)), y.index_select(0, rows))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()


@torch.no_grad()
def _fit_linear(classifier: nn.Sequential, x: Tensor, y: Tensor, config: EvaluationConfig, rng: Generator) -> None:
    """Take the same steps as `_fit` in half the time, with gradient and Adam written out (classes in rows, batches in
    one buffer): for a linear layer, autograd and the optimiser cost as much as the arithmetic."""
    layer = classifier[0]
    assert isinstance(layer, nn.Linear)
    classes, width = layer.weight.shape
    values = torch.cat([layer.weight.flatten(), layer.bias])
    gradient, mean, square = (torch.zeros_like(values) for _ in range(3))
    (w, b), (w_gradient, b_gradient) = (
        (flat[:-classes].view(classes, width), flat[-classes:]) for flat in (values, gradient)
    )
    buffer, places = x.new_empty(config.batch, width), torch.arange(config.batch)
    decay, decay_square, step = 0.9, 0.999, 0
    for _ in range(config.epochs):
        for rows in torch.randperm(len(x), generator=rng).split(config.batch):
            batch = torch.index_select(x, 0, rows, out=buffer[: len(rows)])
            error = torch.addmm(b[:, None], w, batch.T).softmax(0)
            error[y[rows], places[: len(rows)]] -= 1
            error /= len(rows)
            torch.mm(error, batch, out=w_gradient)
            torch.sum(error, 1, out=b_gradient)
            step += 1
            mean.lerp_(gradient, 1 - decay)
            square.mul_(decay_square).addcmul_(gradient, gradient, value=1 - decay_square)
            size = (square / (1 - decay_square**step)).sqrt_().add_(1e-8)
            values.addcdiv_(mean, size, value=-config.lr / (1 - decay**step))
    layer.weight.copy_(w)
    layer.bias.copy_(b)


def knn_probe(train: Labeled, test_x: Tensor, neighbours: int, temperature: float = 0.1) -> Tensor:
    """Predict classes by a vote of the nearest neighbours by cosine, weighted by exp(similarity / temperature)."""
    bank = F.normalize(train.x, dim=1)
    votes = []
    for queries in F.normalize(test_x, dim=1).split(1024):
        similarity, nearest = (queries @ bank.T).topk(min(neighbours, len(bank)), dim=1)
        tally = torch.zeros(len(queries), int(train.y.max()) + 1)
        tally.scatter_add_(1, train.y[nearest], (similarity / temperature).exp())
        votes.append(tally.argmax(1))
    return torch.cat(votes)


def flattened(train: Labeled, test_x: Tensor) -> tuple[Labeled, Tensor]:
    """Divide each principal component of the features by the square root of its deviation (halfway to whitening).

    Nearest neighbours gain from this by themselves. So where the components of features differ in strength, this is the
    fair control for a method that makes them alike.
    """
    centre = train.x.mean(0)
    _, deviations, axes = torch.linalg.svd((train.x - centre).double(), full_matrices=False)
    kept = deviations > NEGLIGIBLE * deviations[0]
    scaled = (axes[kept].T * (deviations[kept] / deviations[0]).rsqrt()).float()
    return Labeled((train.x - centre) @ scaled, train.y), (test_x - centre) @ scaled


def few_labels(labels: Tensor, per_class: int | None, seed: int) -> Tensor:
    """Return the rows of at most `per_class` random examples of each class; all rows for None."""
    if per_class is None:
        return torch.arange(len(labels))
    return rows_of_each_class(labels, lambda _: per_class, rng_for(seed, "few labels"))


def rows_of_each_class(labels: Tensor, wanted: Callable[[int], int], rng: Generator) -> Tensor:
    """Return random rows of each class: as many as are wanted of a class with so many examples, if there are."""
    order = torch.randperm(len(labels), generator=rng)
    members = [order[labels[order] == label] for label in labels.unique()]
    return torch.cat([rows[: wanted(len(rows))] for rows in members]).sort().values

import torch
from torch import nn

from hetero_ssfl.config import EvaluationConfig
from hetero_ssfl.data import Images
from hetero_ssfl.learning.finetune import finetune, share_of_labels


def stripes(n: int, seed: int) -> Images:
    """Return images of horizontal or vertical stripes with noise."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2 + 4  # classes need not start at 0
    bars = (torch.arange(8) % 2 * 160).byte()
    pixels = torch.stack([bars.expand(8, 8) if y == 4 else bars.expand(8, 8).T for y in labels]).unsqueeze(1)
    noise = torch.randint(0, 90, pixels.shape, generator=rng, dtype=torch.uint8)
    return Images(pixels + noise, labels, tuple("abcdef"))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


def test_finetuning_learns_from_a_few_labels_and_does_not_change_the_encoder() -> None:
    network = encoder()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    accuracy = finetune(network.eval(), stripes(40, 0), stripes(200, 1), EvaluationConfig(finetune_lr=0.02), seed=0)
    assert accuracy > 95
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert accuracy == finetune(network, stripes(40, 0), stripes(200, 1), EvaluationConfig(finetune_lr=0.02), seed=0)


def test_a_fraction_of_labels_includes_each_class_at_least_once() -> None:
    labels = torch.tensor([0] * 100 + [1] * 20 + [2] * 3)
    rows = share_of_labels(labels, 0.1, seed=0)
    assert torch.bincount(labels[rows]).tolist() == [10, 2, 1]
    assert not torch.equal(rows, share_of_labels(labels, 0.1, seed=1))

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetero_ssfl.config import EvaluationConfig
from hetero_ssfl.kernels.cka import mutual_cka
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.learning.probes import (
    Labeled,
    _fit,
    _fit_linear,
    few_labels,
    flattened,
    knn_probe,
    linear_probe,
    probe,
)
from hetero_ssfl.seeding import global_seed, rng_for

CONFIG = EvaluationConfig(batch=32)  # enough steps for these small sets


def blobs(n: int, seed: int, distance: float = 4.0) -> Labeled:
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    centres = distance * torch.eye(3, 8)
    return Labeled(centres[y] + torch.randn(n, 8, generator=rng), y)


def test_separable_classes_are_found_by_both_probes() -> None:
    scores = probe(blobs(300, 0), blobs(150, 1), CONFIG, seed=0)
    assert scores["linear"] > 95
    assert scores["knn"] > 95


def test_features_without_information_score_at_chance() -> None:
    scores = probe(blobs(300, 0, distance=0), blobs(600, 1, distance=0), CONFIG, seed=0)
    assert 20 < scores["linear"] < 47
    assert 20 < scores["knn"] < 47


def test_flattened_neighbours_see_classes_that_strong_directions_hide() -> None:
    def hidden(seed: int) -> Labeled:
        plain = blobs(300, seed)
        noise = 40 * torch.randn(300, 4, generator=torch.Generator().manual_seed(10 + seed))
        return Labeled(torch.cat([plain.x, noise], 1), plain.y)

    config = EvaluationConfig(probes=("knn", "knn-flat"))
    scores = probe(hidden(0), hidden(1), config, seed=0)
    assert scores["knn"] < 75
    assert scores["knn-flat"] > scores["knn"] + 10


def test_flattening_takes_the_root_of_every_deviation() -> None:
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0)) @ torch.diag(torch.logspace(0, 2, 12))
    flat, same = flattened(Labeled(x, torch.zeros(200)), x)
    expected = torch.linalg.svdvals((x - x.mean(0)).double())
    found = torch.linalg.svdvals(flat.x.double())
    assert torch.allclose(found, (expected * expected[0]).sqrt(), rtol=1e-3)
    assert torch.equal(flat.x, same)


def test_linear_probe_equals_the_plain_loop() -> None:
    """Uses the paper's protocol (Adam, lr 0.003, batch 512, 100 epochs) with one full batch, so order is irrelevant."""
    train, test = blobs(100, 0, 1.0), blobs(400, 1, 1.0)
    predicted = linear_probe(train, test.x, EvaluationConfig(standardize=False), seed=7)
    with global_seed(7, "probe"):
        layer = nn.Linear(8, 3)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.003)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(layer(train.x), train.y).backward()
        optimiser.step()
    assert (layer(test.x).argmax(1) == predicted).double().mean() > 0.995


@pytest.mark.parametrize("batch", [16, 37, 500])
def test_the_written_out_steps_equal_autograd_and_adam(batch: int) -> None:
    """Includes a last batch that is smaller than the others."""
    train, config = blobs(100, 0, 0.5), EvaluationConfig(epochs=40, batch=batch)
    layers = [nn.Sequential(nn.Linear(8, 3)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    one, other = (cast(nn.Linear, layer[0]) for layer in layers)
    before = one.weight.clone()
    for fit, layer in zip((_fit, _fit_linear), layers, strict=True):
        fit(layer, train.x, train.y, config, rng_for(0))
    assert torch.allclose(one.weight, other.weight, atol=1e-5)
    assert torch.allclose(one.bias, other.bias, atol=1e-5)
    assert not torch.allclose(one.weight, before, atol=1e-2)


def test_standardising_makes_the_probe_independent_of_feature_scale() -> None:
    train, test = blobs(200, 0, 1.5), blobs(200, 1, 1.5)
    plain = linear_probe(train, test.x, CONFIG, seed=0)
    scaled = linear_probe(Labeled(train.x * 1000, train.y), test.x * 1000, CONFIG, seed=0)
    assert (plain == scaled).double().mean() > 0.99


def test_what_a_probe_says_of_an_image_does_not_depend_on_the_other_test_images() -> None:
    train, test = blobs(60, 0, distance=1.0), blobs(30, 1, distance=1.0)
    config = EvaluationConfig(epochs=5)
    alone = linear_probe(train, test.x, config, 0)
    beside = linear_probe(train, torch.cat([test.x, 50 + 100 * test.x]), config, 0)
    assert torch.equal(beside[:30], alone)


def test_knn_equals_brute_force_voting() -> None:
    train, test = blobs(40, 0, 1.0), blobs(20, 1, 1.0)
    predicted = knn_probe(train, test.x, neighbours=5)
    for query, answer in zip(test.x, predicted, strict=True):
        similarity = torch.stack([torch.cosine_similarity(query, row, dim=0) for row in train.x])
        tally = [0.0] * 3
        for k in similarity.argsort(descending=True)[:5].tolist():
            tally[int(train.y[k])] += float(torch.exp(similarity[k] / 0.1))
        assert int(answer) == tally.index(max(tally))


def test_classes_come_from_the_training_labels() -> None:
    """A test class without training examples counts as wrong, and labels need not start at 0."""
    train, test = blobs(90, 0), blobs(90, 1)
    shifted = probe(Labeled(train.x, train.y + 5), Labeled(test.x, test.y + 5), CONFIG, seed=0)
    assert shifted["linear"] > 95
    two = train.only(torch.tensor([0, 1]))
    assert probe(two, test, CONFIG, seed=0)["knn"] == pytest.approx(100 * 2 / 3, abs=5)


@given(per_class=st.integers(1, 8), seed=st.integers(0, 99))
def test_few_labels_takes_the_same_number_of_each_class(per_class: int, seed: int) -> None:
    labels = torch.arange(60) % 4
    rows = few_labels(labels, per_class, seed)
    assert torch.bincount(labels[rows]).tolist() == [per_class] * 4
    assert torch.equal(rows, few_labels(labels, per_class, seed))


def test_features_use_evaluation_mode_and_restore_the_mode() -> None:
    norm = nn.BatchNorm1d(12)
    encoder = nn.Sequential(nn.Flatten(), norm, nn.Linear(12, 5))
    pixels = torch.randint(0, 256, (9, 3, 2, 2), dtype=torch.uint8)
    assert norm.running_mean is not None
    statistics = norm.running_mean.clone()
    one, all_at_once = extract_features(encoder, pixels, batch=1), extract_features(encoder, pixels)
    assert torch.allclose(one, all_at_once, atol=1e-6)
    assert encoder.training
    assert torch.equal(norm.running_mean, statistics)


def test_mutual_cka_is_one_for_rotated_and_near_zero_for_unrelated_clients() -> None:
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(200, 6, generator=rng)
    rotation, other = torch.linalg.qr(torch.randn(6, 6, generator=rng)).Q, torch.randn(200, 6, generator=rng)
    matrix = mutual_cka([z, z @ rotation, other])
    assert float(matrix[0, 1]) == pytest.approx(1, abs=1e-6)
    assert abs(float(matrix[0, 2])) < 0.1
    assert torch.equal(matrix, matrix.T)

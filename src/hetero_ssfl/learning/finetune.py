"""Semi-supervised evaluation: fine-tune the whole encoder on a few labels."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import EvaluationConfig
from ..data import Images, to_input
from ..seeding import global_seed, rng_for
from .features import extract_features
from .probes import Measure, accuracy, rows_of_each_class


def finetune(
    encoder: nn.Module, train: Images, test: Images, config: EvaluationConfig, seed: int, measure: Measure = accuracy
) -> float:
    """Train a copy of the encoder and a linear layer on `train`; return the accuracy in percent on `test`."""
    assert train.labels is not None
    assert test.labels is not None
    classes, targets = train.labels.unique(return_inverse=True)
    device = next(encoder.parameters()).device
    tuned = copy.deepcopy(encoder).train()
    width = extract_features(encoder, train.pixels[:2]).shape[1]
    with global_seed(seed, "finetune"):
        model = nn.Sequential(tuned, nn.Linear(width, len(classes))).to(device)
        optimiser = torch.optim.Adam(model.parameters(), lr=config.finetune_lr)
        rng = rng_for(seed, "finetune order")
        batch = min(64, len(train))
        for _ in range(config.finetune_epochs):
            for rows in torch.randperm(len(train), generator=rng).split(batch):
                if len(rows) < 2:  # BatchNorm cannot train on one image
                    continue
                loss = F.cross_entropy(model(to_input(train.pixels[rows].to(device))), targets[rows].to(device))
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
    return measure(classes[extract_features(model, test.pixels).argmax(1)], test.labels)


def share_of_labels(labels: Tensor, share: float, seed: int) -> Tensor:
    """Return the rows of a random fraction of each class's examples, at least one of each."""
    return rows_of_each_class(labels, lambda count: max(1, round(share * count)), rng_for(seed, "share of labels"))

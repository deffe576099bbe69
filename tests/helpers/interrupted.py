"""A user's script that trains a federation of objects in a given folder. The test kills it and starts it again."""

import sys

import torch

from helpers.pieces import net
from hetero_ssfl import Client, federate
from hetero_ssfl.config import DataConfig
from hetero_ssfl.data import load_images


def noisy(batch: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return batch + 0.1 * torch.randn(batch.shape, generator=rng)


digits = load_images(DataConfig(source="digits", side=16), "train")
clients = [Client(digits.pixels[:200], net()), Client(digits.pixels[200:400], "resnet8(width=4)")]
settings = {"evaluation.every": 0, "local_epochs": 4}
run = federate(
    clients,
    64,
    views=noisy,
    config="smoke",
    rounds=3,
    settings=settings,
    run_dir=sys.argv[1],
    progress=lambda event: print(event.kind, getattr(event, "round", None), flush=True),
)

"""The time that a node expects of a round, compared with the time it takes: see `[limits]` in docs/deployment.md.

python benchmarks/estimates.py      # half a minute of one core
"""

import time

import torch

from hetero_ssfl.config import ClientsConfig, Config, ModelConfig, OptimConfig, RadConfig
from hetero_ssfl.data import Counts
from hetero_ssfl.learning.forward_cost import work_of
from hetero_ssfl.learning.learner import build_learner
from hetero_ssfl.learning.training import TrainingClient
from hetero_ssfl.methods import Broadcast, method_for
from hetero_ssfl.methods.costs import Workload, training_seconds

CASES = (  # encoder, channels, side, batch, images
    ("resnet8(width=4)", 1, 8, 16, 64),
    ("resnet8(width=4)", 1, 8, 2, 64),
    ("mobilenet(width=16)", 1, 8, 2, 64),
    ("vit(width=64, depth=3, heads=2)", 1, 8, 2, 64),
    ("resnet8(width=16)", 3, 32, 64, 128),
    ("mobilenet(width=16)", 3, 32, 64, 128),
    ("vit(width=64, depth=3, heads=2)", 3, 32, 64, 128),
    ("resnet10(width=16)", 3, 32, 128, 128),
    ("resnet18", 3, 32, 16, 16),
    ("resnet10(width=16)", 3, 64, 16, 32),
)


def compare(encoder: str, channels: int, side: int, batch: int, images: int) -> tuple[float, float]:
    """Return the estimated and the measured processor time of one local epoch; the best of three after a warm-up."""
    model = ModelConfig(encoder=encoder)
    config = Config(
        method="local",
        local_epochs=1,
        rad=RadConfig(size=4),
        clients=ClientsConfig(count=1, models=(model,)),
        optim=OptimConfig(batch=batch),
    )
    pixels = torch.randint(0, 255, (images, channels, side, side), dtype=torch.uint8)
    learner = build_learner(config.model_of(0), config.ssl, channels, side, 0)
    client, method, times = TrainingClient("measured", config, learner, pixels, pixels), method_for(config), []
    for _ in range(4):
        started = time.process_time()
        method.local_update(client, Broadcast(1))
        times.append(time.process_time() - started)
    work = Workload(work_of(encoder, channels, side), Counts(images, images, 10), channels, side)
    return sum(training_seconds(config, work).values()), min(times[1:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        estimated, measured = compare(*case)
        print(f"{case[0]:34} side {case[2]:2} batch {case[3]:3}: {estimated / measured:.2f} times {measured:.3f} s")

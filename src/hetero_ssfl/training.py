"""The only local training loop: every method, with or without peers, passes through `train`."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from .config import Config
from .consensus import effective_rank
from .data import random_view, take, to_input
from .models import Learner
from .objectives import feature_spread, local_loss
from .optimisers import build_optimiser
from .seeding import global_seed, rng_for

Regulariser = Callable[[Learner, Generator, int], Tensor]
"""A further term of the loss, already weighted, from the networks, a generator and the step's number in the epoch."""

Objective = Callable[["TrainingClient", Tensor, Tensor | None, Generator], tuple[Tensor, Tensor]]
"""The local loss of a batch of images (and labels, where there are any), and features to watch for collapse."""

Progress = Callable[[float, float], None]
"""Called with the share of the round done and the loss: after each step on a CPU, after some on an accelerator."""

STEPS_BETWEEN_READS = 50  # on an accelerator, where reading the loss waits for all work that is queued


@dataclass
class TrainingClient:
    """A participant: its name, its networks, its images and the RAD it shares with the others."""

    name: str
    config: Config
    learner: Learner
    pixels: Tensor
    rad: Tensor
    labels: Tensor | None = None
    """Read by supervised baselines only."""
    round: int = 0
    """The last round whose training the networks contain."""
    progress: Progress = field(default=lambda *_: None)

    @property
    def device(self) -> torch.device:
        return next(self.learner.parameters()).device


def self_supervised(
    client: TrainingClient, pixels: Tensor, labels: Tensor | None, rng: Generator
) -> tuple[Tensor, Tensor]:
    """The loss that `ssl.kind` names on views of each image; labels are not looked at."""
    views = [random_view(pixels, client.config.views, rng) for _ in range(client.config.views.count)]
    return local_loss(client.learner, views)


def train(
    client: TrainingClient,
    round_number: int,
    regulariser: Regulariser | None = None,
    objective: Objective = self_supervised,
) -> dict[str, float]:
    """E local epochs of the objective (plus the regulariser); returns means over the round's steps.

    `spread` and `batch_rank` (the effective rank of the last batch's projections) show a collapse before the loss does.
    """
    config, learner = client.config, client.learner
    pixels = torch.cat([client.pixels, client.rad]) if config.rad.in_ssl else client.pixels
    batch = min(config.optim.batch, len(pixels))
    steps = len(pixels) // batch
    device, on_cpu = client.device, client.device.type == "cpu"
    optimiser = build_optimiser(learner.trainable(), config.optim)
    scaler = torch.amp.GradScaler(device.type, enabled=config.engine.precision == "float16")
    no_term, sums = torch.zeros((), device=device), torch.zeros(3, device=device)
    learner.train()
    for epoch in range(config.local_epochs):
        # Local data and regulariser draw from separate streams, so that mu = 0 is exactly local training.
        scope = ("train", client.name, round_number, epoch)
        rng, rng_regulariser = rng_for(config.seed, *scope), rng_for(config.seed, *scope, "regulariser")
        order = torch.randperm(len(pixels), generator=rng)
        with global_seed(config.seed, *scope, "global"):
            for step in range(steps):
                done = (epoch + step / steps) / config.local_epochs
                for group in optimiser.param_groups:
                    group["lr"] = learning_rate(config, round_number - 1 + done)
                rows = order[step * batch : (step + 1) * batch]
                labels = None if client.labels is None else take(client.labels, rows, device)
                with mixed_precision(config, device):
                    loss, projection = objective(client, take(pixels, rows, device), labels, rng)
                    term = no_term if regulariser is None else regulariser(learner, rng_regulariser, step)
                optimiser.zero_grad(set_to_none=True)
                scaler.scale(loss + term).backward()
                if config.optim.clip_norm:
                    scaler.unscale_(optimiser)
                    torch.nn.utils.clip_grad_norm_(learner.trainable(), config.optim.clip_norm)
                scaler.step(optimiser)
                scaler.update()
                learner.move_target(ema(config, round_number - 1 + done))
                values = torch.stack([loss.detach(), term.detach(), feature_spread(projection)])
                sums += values
                if on_cpu or step % STEPS_BETWEEN_READS == 0:
                    client.progress(done, float(values[0] + values[1]))
    optimiser.zero_grad(set_to_none=True)  # a client that waits for its next round needs no gradients
    ssl, term_mean, spread = (sums / (steps * config.local_epochs)).cpu().tolist()
    if not math.isfinite(ssl + term_mean):
        raise FloatingPointError(
            f"the loss of {client.name} is {ssl + term_mean} in round {round_number}; "
            "lower optim.lr or set optim.clip_norm"
        )
    client.round = round_number
    rank = effective_rank(projection.detach().cpu())
    return {"loss_ssl": ssl, "loss_alignment": term_mean, "spread": spread, "batch_rank": rank}


def mixed_precision(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """Let torch choose half precision where it is safe, if the config asks for it; sums and norms stay float32."""
    if config.engine.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.engine.precision))


def learning_rate(config: Config, rounds_done: float) -> float:
    """Constant, or a cosine that reaches 0 at the end of the last round; at first it may rise from 0."""
    optim = config.optim
    peak = optim.lr * min(1.0, rounds_done / optim.warmup) if optim.warmup else optim.lr
    return peak if optim.schedule == "constant" else peak * cosine(config, rounds_done)


def ema(config: Config, rounds_done: float) -> float:
    """The share of the target network that a step keeps: constant, or from `ema` to `ema_end` along a cosine."""
    start, end = config.ssl.ema, config.ssl.ema_end
    return start if end is None else end - (end - start) * cosine(config, rounds_done)


def cosine(config: Config, rounds_done: float) -> float:
    """From 1 at the beginning of the run to 0 at its end."""
    return (1 + math.cos(math.pi * rounds_done / config.rounds)) / 2


@torch.no_grad()
def rad_representations(client: TrainingClient, batch: int = 512) -> Tensor:
    """Phi(X; W) of the whole, clean RAD, from the network in evaluation mode."""
    client.learner.eval()
    layer = client.config.alignment.layer
    parts = [client.learner.represent(to_input(rows.to(client.device)), layer) for rows in client.rad.split(batch)]
    client.learner.train()
    return torch.cat(parts).float().cpu()

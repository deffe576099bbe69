"""The one local training loop, which every method uses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..config import Config
from ..data import is_pixels, random_view, take, ten_crop
from ..errors import DivergedError, NotFiniteError
from ..kernels.factor import effective_rank
from ..seeding import global_seed, rng_for
from .features import extract_features
from .learner import Learner
from .losses import local_loss
from .optimisers import build_optimiser

Regulariser = Callable[[Learner, Generator, "Step"], Tensor]
"""Returns another term of the loss, already weighted, from the networks, a generator and what the step has computed."""

Objective = Callable[["TrainingClient", Tensor, Tensor | None, Generator], tuple[Tensor, Tensor]]
"""Returns the local loss of a batch of images (and labels, if any), and features to monitor for collapse."""

Progress = Callable[[float, float], None]
"""Called with the completed fraction of the round and the loss: each step on a CPU, less often on an accelerator."""

MAX_SANE_WEIGHT = 1e3  # beyond it, a network's output overflows because training diverged
STEPS_BETWEEN_READS = 50  # on an accelerator, where reading the loss waits for all queued work


@dataclass(frozen=True)
class Step:
    """What a regulariser can use of a training step."""

    number: int
    """Within the epoch."""
    rows: Tensor
    """The images of the batch: rows of the client's own images, followed by those of the RAD."""
    features: Sequence[Tensor]
    """The encoder's outputs for the batch in the local loss, one tensor per view."""


@dataclass
class TrainingClient:
    """A participant's networks, images and RAD in memory, as a method sees them."""

    name: str
    config: Config
    learner: Learner
    pixels: Tensor
    rad: Tensor
    labels: Tensor | None = None
    """Used by supervised baselines only."""
    round: int = 0
    """The last round whose training the networks contain."""
    progress: Progress = field(default=lambda *_: None)

    @property
    def device(self) -> torch.device:
        return next(self.learner.parameters()).device


def self_supervised(
    client: TrainingClient, pixels: Tensor, labels: Tensor | None, rng: Generator
) -> tuple[Tensor, Tensor]:
    """Compute the loss `ssl.kind` on views of each image; labels are ignored."""
    views = [random_view(pixels, client.config.views, rng) for _ in range(client.config.views.count)]
    return local_loss(client.learner, views)


def train(
    client: TrainingClient,
    round_number: int,
    regulariser: Regulariser | None = None,
    objective: Objective = self_supervised,
) -> dict[str, float]:
    """Train a round on the objective (plus the regulariser) and return means over its steps.

    `spread` and `batch_rank` (the effective rank of the last batch's projections) show a collapse before the loss does.
    """
    config, learner = client.config, client.learner
    pixels = torch.cat([client.pixels, client.rad]) if config.rad.in_ssl else client.pixels
    batch = min(config.optim.batch, len(pixels))
    steps, epochs = len(pixels) // batch, config.epochs_of(len(pixels))
    device, on_cpu = client.device, client.device.type == "cpu"
    optimiser = build_optimiser(learner.trainable(), config.optim)
    half = None if config.engine.precision == "float32" else getattr(torch, config.engine.precision)
    autocast = torch.autocast(device.type, half, enabled=half is not None)  # sums and norms stay float32
    scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)
    no_term, sums, features = torch.zeros((), device=device), torch.zeros(3, device=device), list[Tensor]()
    learner.train()
    for epoch in range(epochs):
        # Local data and regulariser use separate generators, so that mu = 0 is exactly local training.
        scope = ("train", client.name, round_number, epoch)
        rng, rng_regulariser = rng_for(config.seed, *scope), rng_for(config.seed, *scope, "regulariser")
        order = torch.randperm(len(pixels), generator=rng)
        with (
            global_seed(config.seed, *scope, "global"),
            learner.encoder.register_forward_hook(lambda _module, _inputs, output: features.append(output)),
        ):
            for step, rows in enumerate(order[: steps * batch].split(batch)):
                done = (epoch + step / steps) / epochs
                for group in optimiser.param_groups:
                    group["lr"] = learning_rate(config, round_number - 1 + done)
                labels = None if client.labels is None else take(client.labels, rows, device)
                with autocast:
                    features.clear()
                    loss, projection = objective(client, take(pixels, rows, device), labels, rng)
                    seen = Step(step, rows, tuple(features))
                    term = regulariser(learner, rng_regulariser, seen) if regulariser else no_term
                if on_cpu and not math.isfinite(float(loss.detach() + term.detach())):
                    raise not_finite(client, round_number, take(pixels, rows, device))
                optimiser.zero_grad(set_to_none=True)
                scaler.scale(loss + term).backward()
                if config.optim.clip_norm:
                    scaler.unscale_(optimiser)
                    torch.nn.utils.clip_grad_norm_(learner.trainable(), config.optim.clip_norm)
                scaler.step(optimiser)
                scaler.update()
                learner.move_target(ema(config, round_number - 1 + done))
                sums += torch.stack([loss.detach(), term.detach(), feature_spread(projection)])
                if on_cpu or step % STEPS_BETWEEN_READS == 0:
                    client.progress(done, float(loss.detach() + term.detach()))
    optimiser.zero_grad(set_to_none=True)  # free the gradients: a waiting client does not need them
    ssl, term_mean, spread = (sums / (steps * epochs)).cpu().tolist()
    if not math.isfinite(ssl + term_mean):
        raise not_finite(client, round_number, take(pixels, rows, device))
    client.round = round_number
    rank = effective_rank(projection.detach().cpu())
    return {"loss_ssl": ssl, "loss_alignment": term_mean, "spread": spread, "batch_rank": rank}


def feature_spread(z: Tensor) -> Tensor:
    """Return the standard deviation of l2-normalised features, scaled so that 1 is isotropic and 0 is collapsed."""
    unit = F.normalize(z.detach().float(), dim=1)
    return unit.std(0).mean() * z.shape[1] ** 0.5


@torch.no_grad()
def not_finite(
    client: TrainingClient, round_number: int, pixels: Tensor, features: Tensor | None = None
) -> NotFiniteError:
    """Return the reason for a loss or features that are not finite: the user's views, encoder or loss, or too large
    steps. Without `features` they are computed from views of `pixels`."""
    config, name, weights = client.config, client.name, client.learner.parameters()
    diverged = DivergedError(
        f"the loss of {name} diverged in round {round_number}; lower optim.lr or set optim.clip_norm."
    )
    if not float(torch.stack([w.abs().max() for w in weights if w.numel()]).max()) < MAX_SANE_WEIGHT:  # also for nan
        return diverged
    if features is None:
        view = random_view(pixels, config.views, rng_for(config.seed, "why not finite"))
        if not bool(view.isfinite().all()):
            return NotFiniteError(
                f"the views of {name} ('{config.views.function}') have values that are not finite in round "
                f"{round_number}, for finite samples. Return finite views."
            )
        features = client.learner.encoder(view)
    bad = int((~features.isfinite()).flatten(1).any(1).sum())
    if bad:
        return NotFiniteError(
            f"the encoder of {name} returned nan or inf for {bad} of {len(features)} samples in round "
            f"{round_number}, for finite weights. Check its forward for divisions by 0, logarithms and square roots."
        )
    if ":" in config.ssl.kind or ":" in config.alignment.kernel:
        return NotFiniteError(
            f"the loss of {name} is not finite in round {round_number}, for finite features of its encoder. "
            f"Check the loss '{config.ssl.kind}' and the kernel '{config.alignment.kernel}'."
        )
    return diverged


def learning_rate(config: Config, rounds_done: float) -> float:
    """Return the learning rate: constant, or a cosine that reaches 0 after the last round; with optional warm-up."""
    optim = config.optim
    peak = optim.lr * min(1.0, rounds_done / optim.warmup) if optim.warmup else optim.lr
    return peak if optim.schedule == "constant" else peak * cosine(config, rounds_done)


def ema(config: Config, rounds_done: float) -> float:
    """Return the decay of the target network's moving average: constant, or a cosine from `ema` to `ema_end`."""
    start, end = config.ssl.ema, config.ssl.ema_end
    return start if end is None else end - (end - start) * cosine(config, rounds_done)


def cosine(config: Config, rounds_done: float) -> float:
    """Return a value that falls from 1 at the start of the run to 0 at its end."""
    return (1 + math.cos(math.pi * rounds_done / config.rounds)) / 2


def rad_representations(client: TrainingClient) -> Tensor:
    """Return Phi(X; W) for the whole RAD without random views, with the network in evaluation mode.

    With `alignment.ten_crop` it is the mean over crops of an image, and their mirror images. In the mean kernel this is
    worth as much as more clients.
    """
    config, learner = client.config, client.learner
    crop = config.alignment.ten_crop and is_pixels(client.rad.dtype)

    def represent(x: Tensor) -> Tensor:
        crops = ten_crop(x, config.views) if crop else [x]
        return torch.stack([learner.represent(x, config.alignment.layer) for x in crops]).mean(0)

    features = extract_features(learner, client.rad, forward=represent)
    if not bool(features.isfinite().all()):
        raise not_finite(client, client.round, client.rad, features)
    return features

"""The one local training loop, which every method uses."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..config import Config
from ..data import random_view, take, to_input
from ..errors import DivergedError, NotFiniteError
from ..kernels.factor import effective_rank
from ..seeding import global_seed, rng_for
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
    """Train E local epochs on the objective (plus the regulariser) and return means over the round's steps.

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
        # Local data and regulariser use separate generators, so that mu = 0 is exactly local training.
        scope = ("train", client.name, round_number, epoch)
        rng, rng_regulariser = rng_for(config.seed, *scope), rng_for(config.seed, *scope, "regulariser")
        order = torch.randperm(len(pixels), generator=rng)
        with global_seed(config.seed, *scope, "global"), outputs_of(learner.encoder) as features:
            for step in range(steps):
                done = (epoch + step / steps) / config.local_epochs
                for group in optimiser.param_groups:
                    group["lr"] = learning_rate(config, round_number - 1 + done)
                rows = order[step * batch : (step + 1) * batch]
                labels = None if client.labels is None else take(client.labels, rows, device)
                with mixed_precision(config, device):
                    features.clear()
                    loss, projection = objective(client, take(pixels, rows, device), labels, rng)
                    seen = Step(step, rows, tuple(features))
                    term = no_term if regulariser is None else regulariser(learner, rng_regulariser, seen)
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
                values = torch.stack([loss.detach(), term.detach(), feature_spread(projection)])
                sums += values
                if on_cpu or step % STEPS_BETWEEN_READS == 0:
                    client.progress(done, float(values[0] + values[1]))
    optimiser.zero_grad(set_to_none=True)  # free the gradients: a waiting client does not need them
    ssl, term_mean, spread = (sums / (steps * config.local_epochs)).cpu().tolist()
    if not math.isfinite(ssl + term_mean):
        raise not_finite(client, round_number, take(pixels, rows, device))
    client.round = round_number
    rank = effective_rank(projection.detach().cpu())
    return {"loss_ssl": ssl, "loss_alignment": term_mean, "spread": spread, "batch_rank": rank}


@contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what the module returns."""
    outputs: list[Tensor] = []
    hook = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()


def feature_spread(z: Tensor) -> Tensor:
    """Return the standard deviation of l2-normalised features, scaled so that 1 is isotropic and 0 is collapsed."""
    unit = F.normalize(z.detach().float(), dim=1)
    return unit.std(0).mean() * z.shape[1] ** 0.5


@torch.no_grad()
def not_finite(client: TrainingClient, round_number: int, pixels: Tensor) -> NotFiniteError:
    """Return the reason for a loss that is not a number: the user's views, encoder or loss, or too large steps."""
    learner, config = client.learner, client.config
    if _has_sane_weights(learner):
        view = random_view(pixels, config.views, rng_for(config.seed, "why not finite"))
        if not bool(view.isfinite().all()):
            return NotFiniteError(
                f"the views of {client.name} ('{config.views.function}') have values that are not finite in round "
                f"{round_number}, for finite samples. Return finite views."
            )
        features = learner.encoder(view)
        if not bool(features.isfinite().all()):
            return _bad_encoder(client, round_number, features)
        if ":" in config.ssl.kind or ":" in config.alignment.kernel:
            return NotFiniteError(
                f"the loss of {client.name} is not finite in round {round_number}, for finite features of its encoder. "
                f"Check the loss '{config.ssl.kind}' and the kernel '{config.alignment.kernel}'."
            )
    return _diverged(client, round_number)


def _has_sane_weights(learner: Learner) -> bool:
    sizes = [parameter.abs().max() for parameter in learner.parameters() if parameter.numel()]
    return float(torch.stack(sizes).max()) < MAX_SANE_WEIGHT  # false for nan


def _diverged(client: TrainingClient, round_number: int) -> DivergedError:
    return DivergedError(
        f"the loss of {client.name} diverged in round {round_number}; lower optim.lr or set optim.clip_norm."
    )


def _bad_encoder(client: TrainingClient, round_number: int, features: Tensor) -> NotFiniteError:
    bad = int((~features.isfinite()).flatten(1).any(1).sum())
    return NotFiniteError(
        f"the encoder of {client.name} returned nan or inf for {bad} of {len(features)} samples in round "
        f"{round_number}, for finite weights. Check its forward for divisions by 0, logarithms and square roots."
    )


def mixed_precision(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """Return torch's autocast context if the config asks for half precision; sums and norms stay float32."""
    if config.engine.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.engine.precision))


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


@torch.no_grad()
def rad_representations(client: TrainingClient, batch: int = 512) -> Tensor:
    """Return Phi(X; W) for the whole RAD without augmentation, with the network in evaluation mode."""
    client.learner.eval()
    layer = client.config.alignment.layer
    parts = [client.learner.represent(to_input(rows.to(client.device)), layer) for rows in client.rad.split(batch)]
    client.learner.train()
    features = torch.cat(parts).float().cpu()
    if not bool(features.isfinite().all()):
        sane = _has_sane_weights(client.learner)
        raise _bad_encoder(client, client.round, features) if sane else _diverged(client, client.round)
    return features

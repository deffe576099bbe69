"""The three networks of a client: online W^o, predictor W^p and target W^t."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..config import Layer, ModelConfig, SslConfig
from ..errors import ConfigError
from ..seeding import global_seed
from .encoders import build_encoder


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Linear, BatchNorm, ReLU, Linear: the architecture of both heads of BYOL."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs)
    )


class Learner(nn.Module):
    """W^o = encoder + projector, W^p = predictor, W^t = a moving average of W^o (BYOL and the user's own losses).

    `head` maps features to the coordinates that all clients share, if the alignment term uses them.
    """

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        model: ModelConfig,
        ssl: SslConfig,
        classes: int | None = None,
        coordinates: int | None = None,
    ) -> None:
        super().__init__()
        hidden, outputs = model.projector or ssl.projector
        self.encoder = encoder
        self.projector = mlp(width, hidden, outputs)
        self.predictor = mlp(outputs, model.predictor or ssl.predictor, outputs)
        self.ssl = ssl
        self.target: nn.Module | None = None
        if ssl.has_target:
            self.target = copy.deepcopy(self.online)
            self.target.requires_grad_(False)
        self.classifier = nn.Linear(width, classes) if classes else None  # for supervised baselines
        self.head = nn.Linear(width, coordinates) if coordinates else None

    @property
    def online(self) -> nn.Sequential:
        return nn.Sequential(self.encoder, self.projector)

    def represent(self, x: Tensor, layer: Layer) -> Tensor:
        """Return the online network's output at `layer`: Phi(x; W) in the paper."""
        out: Tensor = self.encoder(x)
        if layer != "encoder":
            out = self.projector(out)
        if layer == "predictor":
            out = self.predictor(out)
        return out

    def targets(self, x: Tensor) -> Tensor:
        """Return the target network's output, without gradient; in BYOL, the other view must predict it."""
        assert self.target is not None
        with torch.no_grad():
            out: Tensor = self.target(x)
        return out

    def trainable(self) -> Iterator[nn.Parameter]:
        return (p for p in self.parameters() if p.requires_grad)

    @torch.no_grad()
    def move_target(self, ema: float | None = None) -> None:
        """W^t <- ema * W^t + (1 - ema) * W^o. The target keeps its own BatchNorm statistics, as in BYOL."""
        if self.target is not None:
            old: list[Tensor] = list(self.target.parameters())
            new: list[Tensor] = list(self.online.parameters())
            torch._foreach_lerp_(old, new, 1 - (self.ssl.ema if ema is None else ema))


def build_learner(
    model: ModelConfig,
    ssl: SslConfig,
    in_channels: int,
    side: int,
    seed: int,
    *scope: str | int,
    classes: int | None = None,
    coordinates: int | None = None,
    example: Tensor | None = None,
) -> Learner:
    """Build a client's networks. Initial parameters depend only on (seed, scope); a module instance keeps its own."""
    with global_seed(seed, *scope):
        encoder, width = build_encoder(model.encoder, in_channels, side, example)
        if not any(p.requires_grad for p in encoder.parameters()):
            raise ConfigError(
                f"encoder '{model.encoder}' has no trainable parameters. "
                "Choose another encoder, or set requires_grad on the parameters to train."
            )
        learner = Learner(encoder, width, model, ssl, classes, coordinates)
    if example is None or example.ndim == 4:
        learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster for images
    return learner


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())

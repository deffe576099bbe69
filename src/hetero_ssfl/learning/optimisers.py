"""Optimisers for local training, by name or as the user's callable."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import OptimConfig
from ..errors import ConfigError
from ..plugins import find

TRUST = 1e-3  # LARS: the norm of a step relative to the norm of the weights


def build_optimiser(parameters: Iterable[nn.Parameter], config: OptimConfig) -> Optimizer:
    """Return a new optimiser; the training loop sets its learning rate before every step."""
    trained, ours = list(parameters), {"sgd": SGD, "lars": LARS, "muon": Muon}.get(config.kind)
    if ours:  # our SGD has everything that the training loop and torch's GradScaler use
        return cast(Optimizer, ours(trained, config.lr, config.momentum, config.weight_decay))
    if config.kind == "adamw":
        return torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay, foreach=True)
    made = find(config.kind, "optim.kind")(trained, config.lr)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optim.kind = '{config.kind}' returned {type(made).__name__}, expected a torch.optim.Optimizer. "
            "Return one for the parameters and the learning rate it is called with."
        )
    return made


class SGD:
    """The same steps as torch.optim.SGD, bit for bit, without its startup time.

    The first step of a torch optimiser imports torch's compiler, which takes a second. A SuperNode starts a process for
    every message.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters, "lr": lr}]
        self.momentum, self.weight_decay = momentum, weight_decay
        self.buffers: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in parameters} if momentum else {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        params: list[Tensor] = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        grads: list[Tensor] = [p.grad for p in params if p.grad is not None]
        if self.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=self.weight_decay))
        if self.momentum:
            buffers = [self.buffers[p] for p in params]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, grads)
            grads = buffers
        torch._foreach_add_(params, grads, alpha=-self.param_groups[0]["lr"])


class LARS(Optimizer):
    """SGD with momentum whose step sizes are scaled by the norms of the weights (You et al., 2017).

    g <- g + decay * w;  g <- g * TRUST * |w| / |g|;  m <- momentum * m + g;  w <- w - lr * m. Biases and the parameters
    of normalisation layers are neither decayed nor scaled, as in BYOL, Barlow Twins and VICReg.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                g = p.grad
                if p.ndim > 1:
                    g = g.add(p, alpha=group["weight_decay"])
                    w_norm, g_norm = p.norm(), g.norm()
                    ratio = TRUST * w_norm / g_norm
                    g = g * torch.where((w_norm > 0) & (g_norm > 0), ratio, torch.ones_like(ratio))
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(g)
                p.add_(m, alpha=-group["lr"])


class Muon(Optimizer):
    """SGD with momentum whose steps are orthogonalised matrices (Jordan et al., 2024); AdamW for all else.

    m <- momentum * m + g;  W <- (1 - lr * decay) W - lr * 0.2 sqrt(max(rows, columns)) * orthogonal(g + momentum * m).
    The factor gives steps the size of AdamW's (Liu et al., 2025, arXiv:2502.16982), so that both share a learning rate.
    A convolution's weight is a matrix with one row per output channel.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        matrices = [p for p in parameters if p.ndim in (2, 4)]
        rest = torch.optim.AdamW([p for p in parameters if p.ndim not in (2, 4)], lr, weight_decay=weight_decay)
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.rest = rest
        self.param_groups += rest.param_groups  # the same dictionaries: a change of the learning rate reaches both

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.rest.step()
        group = self.param_groups[0]
        for p in (p for p in group["params"] if p.grad is not None):
            m = self.state[p].setdefault("momentum", torch.zeros_like(p))
            m.mul_(group["momentum"]).add_(p.grad)
            direction = p.grad.add(m, alpha=group["momentum"]).flatten(1)
            size = 0.2 * max(direction.shape) ** 0.5
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(orthogonal(direction).view_as(p), alpha=-group["lr"] * size)


def orthogonal(m: Tensor) -> Tensor:
    """Return about U V^T for m = U S V^T: five Newton-Schulz steps, which bring singular values near 1 (0.7 to 1.2)."""
    wide = m.T if m.shape[0] > m.shape[1] else m
    x = wide / wide.norm().clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.T if m.shape[0] > m.shape[1] else x

"""The optimiser of a client's local training, by name or as the user's own callable."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from .config import OptimConfig
from .errors import ConfigError
from .plugins import find

TRUST = 1e-3  # LARS: the length of a step relative to the length of the weights


def build_optimiser(parameters: Iterable[nn.Parameter], config: OptimConfig) -> Optimizer:
    """A fresh optimiser; the training loop sets its learning rate before every step."""
    trained = list(parameters)
    if config.kind == "sgd":
        return torch.optim.SGD(
            trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, foreach=True
        )
    if config.kind == "adamw":
        return torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay, foreach=True)
    if config.kind == "lars":
        return LARS(trained, config.lr, config.momentum, config.weight_decay)
    made = find(config.kind, "optim.kind")(trained, config.lr)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optim.kind = '{config.kind}' returned {type(made).__name__}, expected a torch.optim.Optimizer. "
            "Return one for the parameters and the learning rate it is called with."
        )
    return made


class LARS(Optimizer):
    """SGD with momentum whose steps are as long as the weights allow (You et al., 2017).

    g <- g + decay * w;  g <- g * TRUST * |w| / |g|;  m <- momentum * m + g;  w <- w - lr * m. Biases and the parameters
    of norms are neither decayed nor scaled, as BYOL, Barlow Twins and VICReg use it.
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

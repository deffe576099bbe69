"""Where a run differs from the assumptions of the paper's theorem."""

from ...config import Config

DISTANCES = {
    "cka": "mu (1 - CKA) with CKA at most 1",
    "literal-cka": "mu CKA with CKA at most 1",
    "relational-kl": "mu times a KL divergence",
}


def changed_assumptions(config: Config) -> list[str]:
    """Return one sentence for each point where training with this config differs from the theorem."""
    differences = [*_steps(config), *(_alignment(config) if config.alignment.mu else ())]
    some = config.clients.selected_per_round() < config.clients.count
    differences.append((some, "Only some clients take part in a round; in the measured round all do."))
    return [sentence for applies, sentence in differences if applies]


def _steps(config: Config) -> list[tuple[object, str]]:
    optim, ssl = config.optim, config.ssl
    momentum = optim.momentum if optim.kind in ("sgd", "lars", "muon") else 0
    largest = f"{1 / (1 - momentum):.3g}" if momentum < 1 else "infinitely many"
    varies = optim.schedule != "constant" or optim.warmup
    return [
        (True, "The proof takes one gradient step per epoch; the run takes one per minibatch, so E counts steps."),
        (optim.kind != "sgd", f"The theorem is about plain SGD; the run uses the optimiser {optim.kind}."),
        (momentum, f"Momentum {momentum:g}: steps are up to {largest} times eta times the gradient."),
        (optim.weight_decay, f"Weight decay {optim.weight_decay:g} adds a term to each step that is not in the loss."),
        (optim.clip_norm, f"Gradients are clipped to norm {optim.clip_norm}, which makes them biased."),
        (
            varies,
            f"The learning rate is not constant (schedule {optim.schedule}, warm-up of {optim.warmup:g} rounds); the "
            "bound is computed with the largest one of the measured steps.",
        ),
        (
            True,
            "BatchNorm is in training mode, so the loss of an image depends on its minibatch; its running statistics "
            "also move Phi, and L2 includes that.",
        ),
        (
            True,
            "Each step draws new random views, so the run has no fixed loss; the loss is measured on fixed minibatches "
            "and views.",
        ),
        (
            ssl.kind == "byol",
            f"The target network moves at each step (ema {ssl.ema:g}), so the loss itself changes; the measurement "
            "keeps the target of the start of the round.",
        ),
        (
            ssl.kind == "simsiam",
            "Gradients stop at the prediction target, so a step follows only a part of the gradient of the loss.",
        ),
    ]


def _alignment(config: Config) -> list[tuple[object, str]]:
    a = config.alignment
    plain = {"kernel": "linear", "row_normalize": False, "center": False, "power": 1, "normalize": False}
    changed = {key: getattr(a, key) for key, value in plain.items() if getattr(a, key) != value}
    kernel = ", ".join(f"{key} = {_toml(value)}" for key, value in changed.items())
    rare = 'when = "epoch"' if a.when == "epoch" else f"every = {a.every}" if a.every > 1 else ""
    return [
        (
            True,
            f"The alignment term is {DISTANCES[a.distance]}; the proof bounds mu trace(K K_mean), which is not "
            "normalised.",
        ),
        (kernel, f"Kernels are not plain inner products of Phi: {kernel}."),
        (
            rare,
            f"The alignment term is not in every step (alignment.{rare}); the measured loss contains it with "
            "weight mu.",
        ),
        (
            a.trained_layer != a.layer,
            f"The term is computed from the {a.trained_layer}, and the kernels that are exchanged from the {a.layer}; "
            f"L2 and R are those of the {a.layer}.",
        ),
        (a.ramp_rounds, f"mu grows over the first {a.ramp_rounds} rounds."),
    ]


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value:g}"

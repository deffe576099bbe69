"""The measured theorem as a section of a report, and where the run differs from its assumptions."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...config import Config
from ...report.tables import range_of
from ...runs.schema import StudySection, StudyTable

CONSTANTS, LIMITS = ("l1", "l2", "p", "r", "sigma"), ("largest_eta", "largest_mu")
SHARED = ("l2", "p", "r")  # every client moves the mean kernel: a bound has the largest of all clients
HEAD = [
    *("client", "measured change", "bound", "bound / |change|", "L1", "L2", "P", "R", "sigma"),
    *("largest eta", "largest mu"),
]

DISTANCES = {
    "cka": "mu (1 - CKA) with CKA at most 1",
    "literal-cka": "mu CKA with CKA at most 1",
    "relational-kl": "mu times a KL divergence",
}
ALWAYS = (
    "The proof takes one gradient step per epoch; the run takes one per minibatch, so E counts steps.",
    "BatchNorm in training mode makes the loss of an image depend on its minibatch; L2 includes its statistics.",
    "Each step draws new random views; the loss is measured on fixed minibatches and views.",
)


def section(rounds: Sequence[Mapping[str, Any]], changed_assumptions: Sequence[str]) -> StudySection:
    return StudySection(
        title="The convergence bound",
        intro="The paper bounds the change of a client's loss in one round. Beside it stands the change that was "
        "measured over a few steps. The constants are the largest values along these steps; over all weights they are "
        "larger, and so is the bound. docs/theory.md explains them.",
        tables=[StudyTable(caption=_caption(each), head=HEAD, rows=rows(each["clients"])) for each in rounds],
        folded={"Where the run differs from the theorem": list(changed_assumptions)},
    )


def _caption(measured: Mapping[str, Any]) -> str:
    everyone = list(measured["clients"].values())
    steps = range_of([client["constants"]["steps"] for client in everyone], "d")
    return (
        f"round {measured['round']} from the {measured['start']}: E = {steps} steps, "
        f"eta = {max(client['eta'] for client in everyone):.3g}, mu = {max(client['mu'] for client in everyone):g}, "
        f"L = {everyone[0]['constants']['rows']}"
    )


def rows(clients: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return one row per client under HEAD. Below several clients stand the largest L2, P and R."""
    table = []
    for name, client in clients.items():
        change = [f"{client['change']:+.3g}", f"{client['bound']['total']:+.3g}"]
        ratio = "-" if client["ratio"] is None else f"{client['ratio']:.2g}"
        constants = [f"{client['constants'][key]:.3g}" for key in CONSTANTS]
        table.append([name, *change, ratio, *constants, *(_limit(client[key]) for key in LIMITS)])
    if len(clients) > 1:
        largest = {key: max(client["constants"][key] for client in clients.values()) for key in SHARED}
        constants = [f"{largest[key]:.3g}" if key in SHARED else "" for key in CONSTANTS]
        table.append(["largest", "", "", "", *constants, "", ""])
    return table


def _limit(value: float | None) -> str:
    return "any" if value is None else "none" if value == 0 else f"{value:.2g}"


def changed_assumptions(config: Config) -> list[str]:
    """Return one sentence for each point where training with this config differs from the theorem."""
    optim, ssl, a = config.optim, config.ssl, config.alignment
    momentum = optim.momentum if optim.kind in ("sgd", "lars", "muon") else 0
    largest = f"{1 / (1 - momentum):.3g}" if momentum < 1 else "infinitely many"
    some = config.clients.selected_per_round() < config.clients.count
    differences: list[tuple[object, str]] = [
        (optim.kind != "sgd", f"The theorem is about plain SGD; the run uses the optimiser {optim.kind}."),
        (momentum, f"Momentum {momentum:g}: steps are up to {largest} times eta times the gradient."),
        (optim.weight_decay, f"Weight decay {optim.weight_decay:g} adds a term to each step that is not in the loss."),
        (optim.clip_norm, f"Gradients are clipped to norm {optim.clip_norm}, which makes them biased."),
        (
            optim.schedule != "constant" or optim.warmup,
            f"The learning rate is not constant (schedule {optim.schedule}); the bound has the largest one.",
        ),
        (ssl.kind == "byol", "The target network moves at each step; the measurement keeps that of the start."),
        (ssl.kind == "simsiam", "Gradients stop at the prediction target, so a step follows only a part of them."),
        (some, "Only some clients take part in a round; in the measured round all do."),
    ]
    return [*ALWAYS, *[text for applies, text in differences if applies], *(_alignment(config) if a.mu else ())]


def _alignment(config: Config) -> list[str]:
    a = config.alignment
    plain = {"kernel": "linear", "row_normalize": False, "center": False, "power": 1, "normalize": False}
    kernel = ", ".join(f"{key} = {getattr(a, key)}" for key, value in plain.items() if getattr(a, key) != value)
    rare = f"when = {a.when}" if a.when == "epoch" else f"every = {a.every}" if a.every > 1 else ""
    other = f"The term is computed from the {a.trained_layer}, and the kernels that are exchanged from the {a.layer}"
    differences = [
        (True, f"The alignment term is {DISTANCES[a.distance]}; the proof bounds mu trace(K K_mean)."),
        (kernel, f"Kernels are not plain inner products of Phi: {kernel}."),
        (rare, f"The alignment term is not in every step (alignment.{rare}); the measured loss contains it."),
        (a.trained_layer != a.layer, f"{other}; L2 and R are those of the {a.layer}."),
        (a.ramp_rounds, f"mu grows over the first {a.ramp_rounds} rounds."),
    ]
    return [text for applies, text in differences if applies]

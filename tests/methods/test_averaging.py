"""One round of each averaging method, computed by hand for networks with one weight each."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn

from hetero_ssfl.config import load_config
from hetero_ssfl.learning.learner import Learner, build_learner
from hetero_ssfl.learning.training import TrainingClient
from hetero_ssfl.methods import METHODS, Broadcast, Method, ServerState, Update

AVERAGING = importlib.import_module("hetero_ssfl.methods.averaging")
PAPERS_WORDS = ("averaging.divergence=global", "averaging.norm=euclidean")


class OneWeight(nn.Module):
    """Encoder, predictor and target with one weight each."""

    target: Any

    def __init__(self, encoder: float, predictor: float, target: float) -> None:
        super().__init__()
        self.encoder, self.projector, self.predictor, self.target = (nn.Linear(1, 1, bias=False) for _ in range(4))
        for layer, value in zip(self.children(), (encoder, 0.0, predictor, target), strict=True):
            assert isinstance(layer, nn.Linear)
            nn.init.constant_(layer.weight, value)
        self.target = nn.Sequential(self.target, nn.Linear(1, 1, bias=False))

    @property
    def online(self) -> nn.Sequential:
        return nn.Sequential(self.encoder, self.projector)

    def values(self) -> tuple[float, float, float]:
        return self.encoder.weight.item(), self.predictor.weight.item(), self.target[0].weight.item()


def make(
    name: str, encoder: float, predictor: float, target: float = 0.0, examples: int = 1, rounds: int = 1
) -> TrainingClient:
    pixels = torch.zeros(examples, 1, 1, 1, dtype=torch.uint8)
    learner = cast(Learner, OneWeight(encoder, predictor, target))
    return TrainingClient(name, load_config("smoke"), learner, pixels, pixels, None, rounds)


def networks(client: TrainingClient) -> OneWeight:
    return cast(OneWeight, client.learner)


def method(name: str, *overrides: str) -> Method:
    return METHODS[name](load_config("smoke", [f"method={name}", *overrides]))


def globally(encoder: float, predictor: float, **more: float) -> dict[str, torch.Tensor]:
    weights = {"encoder.weight": encoder, "projector.weight": 0.0, "predictor.weight": predictor}
    return {k: torch.tensor([[v]]) for k, v in weights.items()} | {k: torch.tensor(v) for k, v in more.items()}


@pytest.fixture(autouse=True)
def training(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Training that adds a known number to encoder and predictor."""

    def set_step(step: float) -> None:
        def train(client: TrainingClient, round_number: int) -> dict[str, float]:
            with torch.no_grad():
                networks(client).encoder.weight.add_(step)
                networks(client).predictor.weight.add_(step)
            client.round = round_number
            return {}

        monkeypatch.setattr(AVERAGING, "train", train)

    set_step(0.0)
    return set_step


def state_after(rounds: int, **clients: dict[str, torch.Tensor]) -> ServerState:
    return ServerState(rounds, ("a", "b"), globally(10.0, 20.0), clients)


@pytest.mark.parametrize("name", ["fedbyol", "fedu", "fedema"])
def test_the_server_averages_by_number_of_images(name: str, training: Callable[[float], None]) -> None:
    training(0.5)
    averaging = method(name, "averaging.threshold=1e9", *PAPERS_WORDS)
    a, b = make("a", 1.0, 2.0, examples=1), make("b", 5.0, 6.0, examples=3)
    state = state_after(4)
    updates = {c.name: averaging.local_update(c, averaging.broadcast(state, c.name)) for c in (a, b)}
    assert networks(a).encoder.weight.item() == 10.5
    updates["a"].arrays["encoder.weight"].fill_(2.0)  # as if the clients had diverged
    updates["b"].arrays["encoder.weight"].fill_(6.0)
    after = averaging.aggregate(state, updates)
    assert after.round == 5
    assert after.shared["encoder.weight"].item() == (1 * 2.0 + 3 * 6.0) / 4
    assert after.shared["predictor.weight"].item() == 20.5


def test_fedbyol_replaces_the_online_networks_and_keeps_the_target() -> None:
    client = make("a", 1.0, 2.0, target=3.0)
    method("fedbyol").local_update(client, Broadcast(5, globally(10.0, 20.0)))
    assert networks(client).values() == (10.0, 20.0, 3.0)


@pytest.mark.parametrize(("local", "predictor"), [(9.7, 20.0), (9.5, 2.0)])
def test_fedu_takes_the_global_predictor_only_below_the_threshold(local: float, predictor: float) -> None:
    """|10 - 9.7| < 0.4 < |10 - 9.5|."""
    client = make("a", local, 2.0, target=3.0)
    method("fedu", "averaging.threshold=0.4", *PAPERS_WORDS).local_update(client, Broadcast(5, globally(10.0, 20.0)))
    assert networks(client).values() == (10.0, predictor, 3.0)


@pytest.mark.parametrize(("step", "predictor"), [(0.3, 20.0), (0.5, 3.0)])
def test_fedu_as_in_the_published_code_uses_the_last_training(
    step: float, predictor: float, training: Callable[[float], None]
) -> None:
    fedu = method("fedu", "averaging.threshold=0.4", "averaging.divergence=training")
    client = make("a", 1.0, 2.0)
    training(step)
    state = state_after(4)
    state = fedu.aggregate(state, {"a": fedu.local_update(client, fedu.broadcast(state, "a"))})
    assert float(state.clients["a"]["drift"]) == pytest.approx(step)
    training(0.0)
    with torch.no_grad():
        networks(client).predictor.weight.fill_(3.0)
    down = Broadcast(6, {**globally(10.0, 20.0), "drift": state.clients["a"]["drift"]})
    fedu.local_update(client, down)
    assert networks(client).predictor.weight.item() == predictor


def test_fedema_fixes_lambda_after_the_first_participation(training: Callable[[float], None]) -> None:
    training(0.0)
    fedema = method("fedema", "averaging.tau=0.7", *PAPERS_WORDS)
    a, b = make("a", 0.0, 0.0, examples=1), make("b", 0.0, 0.0, examples=1)
    state = state_after(0)
    updates = {c.name: fedema.local_update(c, fedema.broadcast(state, c.name)) for c in (a, b)}
    updates["a"].arrays["encoder.weight"].fill_(4.0)
    updates["b"].arrays["encoder.weight"].fill_(8.0)
    state = fedema.aggregate(state, updates)  # the new global encoder is 6: both are 2 away
    assert float(state.clients["a"]["lambda"]) == pytest.approx(0.7 / 2)
    again = fedema.aggregate(state, {"a": updates["a"]})
    assert float(again.clients["a"]["lambda"]) == pytest.approx(0.7 / 2)
    assert (int(again.clients["a"]["round"]), int(again.clients["b"]["round"])) == (2, 1)


def test_fedema_moves_a_returning_client_part_of_the_way() -> None:
    """lambda 0.05 and distance 8 keep m = 0.4 of the local networks; the target stays."""
    client = make("a", 2.0, 10.0, target=3.0)
    state = state_after(4, a={"lambda": torch.tensor(0.05), "drift": torch.tensor(2.0), "round": torch.tensor(4)})
    fedema = method("fedema", *PAPERS_WORDS)
    fedema.local_update(client, fedema.broadcast(state, "a"))
    assert networks(client).values() == pytest.approx((0.4 * 2 + 0.6 * 10, 0.4 * 10 + 0.6 * 20, 3.0))


def test_fedema_does_not_move_a_client_that_is_very_far_away() -> None:
    client = make("a", 2.0, 10.0, target=3.0)
    state = state_after(4, a={"lambda": torch.tensor(1.0), "drift": torch.tensor(2.0), "round": torch.tensor(4)})
    fedema = method("fedema", *PAPERS_WORDS)
    fedema.local_update(client, fedema.broadcast(state, "a"))
    assert networks(client).values() == (2.0, 10.0, 3.0)


@pytest.mark.parametrize("kept", [{}, {"a": {"lambda": torch.tensor(0.05), "round": torch.tensor(3)}}])
def test_fedema_starts_a_new_or_absent_client_from_the_global_model(kept: dict[str, dict[str, torch.Tensor]]) -> None:
    client = make("a", 2.0, 10.0, target=3.0)
    fedema = method("fedema", *PAPERS_WORDS)
    fedema.local_update(client, fedema.broadcast(state_after(4, **kept), "a"))
    assert networks(client).values() == (10.0, 20.0, 10.0)


def test_fedema_as_in_the_published_code_uses_the_last_training(training: Callable[[float], None]) -> None:
    """A first training that moves by 0.5 fixes lambda = 0.7 / 0.5; one that moves by 0.25 then keeps m = 0.35."""
    fedema = method("fedema", "averaging.divergence=training")
    client, state = make("a", 0.0, 0.0, rounds=0), ServerState(0, ("a",), globally(10.0, 20.0))
    for step in (0.5, 0.25):
        training(step)
        state = fedema.aggregate(state, {"a": fedema.local_update(client, fedema.broadcast(state, "a"))})
    assert float(state.clients["a"]["lambda"]) == pytest.approx(0.7 / 0.5)
    training(0.0)
    with torch.no_grad():
        networks(client).encoder.weight.fill_(0.0)
    wanted = 0.65 * state.shared["encoder.weight"].item()
    fedema.local_update(client, fedema.broadcast(state, "a"))
    assert networks(client).encoder.weight.item() == pytest.approx(wanted)


# --- the rules of FedU's and FedEMA's published code ---


def test_the_published_divergence_is_the_mean_over_the_thirteen_convolutions_of_a_resnet14() -> None:
    """Shortcuts, BatchNorm, projector and predictor do not count."""
    config = load_config("smoke", ["clients.models=['resnet14(width=4)']"])
    learner = build_learner(config.model_of(0), config.ssl, 1, 16, 0)
    before = AVERAGING.shared_weights(learner)
    counted = [
        module.weight
        for name, module in learner.encoder.named_modules()
        if isinstance(module, nn.Conv2d) and "shortcut" not in name
    ]
    assert len(counted) == 13
    steps = torch.arange(1.0, 14.0)
    with torch.no_grad():
        for parameter in learner.parameters():
            if not any(parameter is weight for weight in counted):
                parameter.add_(100.0)
        for weight, step in zip(counted, steps, strict=True):
            weight[0, 0, 0, 0] += step
    moved = AVERAGING.divergence(before, AVERAGING.shared_weights(learner), "layer-mean")
    assert moved == pytest.approx(float(steps.mean()), rel=1e-4)


def test_the_published_divergence_of_an_encoder_without_convolutions_counts_its_matrices() -> None:
    a, b = {"encoder.w": torch.zeros(2, 2), "encoder.b": torch.zeros(2)}, {"encoder.w": torch.ones(2, 2)}
    b |= {"encoder.b": torch.full((2,), 50.0)}
    assert AVERAGING.divergence(a, b, "layer-mean") == pytest.approx(2.0)


def test_fedu_follows_the_published_rule_by_default(training: Callable[[float], None]) -> None:
    """A client far from the global encoder takes the global predictor if its own last training moved it little."""
    fedu = method("fedu")
    client = make("a", 1.0, 2.0)  # 9 away from the global encoder
    training(0.3)
    state = state_after(4)
    state = fedu.aggregate(state, {"a": fedu.local_update(client, fedu.broadcast(state, "a"))})
    training(0.0)
    with torch.no_grad():
        networks(client).encoder.weight.fill_(1.0)
    fedu.local_update(client, Broadcast(6, {**globally(10.0, 20.0), "drift": state.clients["a"]["drift"]}))
    assert networks(client).predictor.weight.item() == 20.0


@pytest.mark.parametrize("kept", [0.25, 0.75])
def test_fedema_mixes_parameters_and_takes_the_statistics_of_batchnorm_as_the_published_code_does(
    kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the global ones, except for a predictor that stays nearer to the client's own than to the global one."""
    monkeypatch.setattr(AVERAGING, "train", lambda *_: {})
    config = load_config("smoke", ["method=fedema", "clients.models=['resnet8(width=4)']"])
    learner = build_learner(config.model_of(0), config.ssl, 1, 16, 0)
    pixels = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    client = TrainingClient("a", config, learner, pixels, pixels, None, 1)
    own = {key: value.clone() for key, value in learner.state_dict().items()}
    everywhere = {k: v + 1 for k, v in AVERAGING.shared_weights(learner).items()}
    down = Broadcast(2, {**everywhere, "lambda": torch.tensor(0.5), "drift": torch.tensor(2 * kept)})
    METHODS["fedema"](config).local_update(client, down)
    for key, value in learner.state_dict().items():
        wanted = own[key]  # the target network
        if key.endswith(("running_mean", "running_var", "num_batches_tracked")):
            stays = key.startswith("target.") or (key.startswith("predictor.") and kept == 0.75)
            wanted = wanted if stays else everywhere[key]
        elif key in everywhere:
            wanted = kept * own[key] + (1 - kept) * everywhere[key]
        torch.testing.assert_close(value, wanted, msg=key)


def test_a_trimmed_mean_leaves_the_largest_and_smallest_values_out() -> None:
    columns = [[1.0, 9.0], [2.0, -50.0], [4.0, 7.0], [1e6, 8.0], [-1e6, 6.0]]
    models: list[Mapping[str, torch.Tensor]] = [
        {"w": torch.tensor(w), "n": torch.tensor(k)} for k, w in enumerate(columns)
    ]
    fifth, median = AVERAGING.trimmed_mean(models, 0.2), AVERAGING.trimmed_mean(models, 0.5)
    assert torch.allclose(fifth["w"], torch.tensor([(1 + 2 + 4) / 3, (6 + 7 + 8) / 3]))
    assert median["w"].tolist() == [2.0, 7.0]
    assert (int(fifth["n"]), int(median["n"])) == (3, 2)
    of_four = AVERAGING.trimmed_mean(models[:4], 0.5)["w"]  # the mean of the middle two
    assert of_four.tolist() == [3.0, 7.5]
    assert AVERAGING.trimmed_mean(models[:1], 0.5)["w"].tolist() == columns[0]


def test_a_trimmed_mean_is_used_only_if_asked_for() -> None:
    updates = {
        name: Update(examples, globally(value, value)) for name, value, examples in (("a", 0.0, 1), ("b", 4.0, 3))
    }
    for trim, expected in (("0", 3.0), ("0.2", 2.0)):
        after = method("fedbyol", f"averaging.trim={trim}").aggregate(state_after(0), updates)
        assert after.shared["encoder.weight"].item() == expected

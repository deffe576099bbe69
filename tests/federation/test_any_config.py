"""A node survives every config: extreme values of every setting, in every kind of message."""

from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.extremes import SETTINGS, changes
from helpers.instructions import RAD, Owner, tiny
from hetero_ssfl.config import Config
from hetero_ssfl.errors import HeteroSSFLError
from hetero_ssfl.federation.client import app as client
from hetero_ssfl.learning.learner import Learner

LIMITS = "cpu_seconds = 2.0\nmemory_mb = 200\ndisk_mb = 20\nweights_may_leave = true\n"
REFUSALS = ("ProtocolError: ", "ConfigError: ", "DataError: ")


class AcceptedError(HeteroSSFLError):
    """Raised in place of the work: the instruction was within the limits."""


class Recorder:
    """Stops each instruction that a node accepts before the work starts, and keeps its participant."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.accepted: list[Any] = []
        real = client.receive

        def receive(*arguments: Any, **named: Any) -> Any:
            self.accepted.append(real(*arguments, **named).participant)
            raise AcceptedError("it would be followed")

        patch.setattr(client, "receive", receive)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    return Owner(tmp_path_factory.mktemp("any-config"), LIMITS)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def with_changes(changed: dict[str, Any]) -> str:
    """Return TOML without a check, as a hostile server would send it."""
    values = tiny().model_dump(mode="json", exclude_none=True)
    for key, value in changed.items():
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[name] = value
    return tomli_w.dumps(values)


rounds = st.sampled_from([*[1] * 8, 0, 3, 4, 999_999, 10**6, -1])
kinds = st.sampled_from(["query", "train", "evaluate"])


def test_every_setting_has_extreme_values() -> None:
    assert {"rounds", "alignment.rank", "evaluation.label_shares", "ssl.projector", "engine.threads"} <= set(SETTINGS)
    assert len(SETTINGS) >= 100


def survives(owner: Owner, recorder: Recorder, kind: str, changed: dict[str, Any], number: int) -> None:
    recorder.accepted.clear()
    before = owner.files()
    reason = owner.refusal(kind, with_changes(changed), RAD, round=number)
    assert len(reason) <= 1000
    if not recorder.accepted:
        assert reason.startswith(REFUSALS), reason
        assert owner.files() == before
        return
    assert "AcceptedError" in reason
    within_limits(recorder.accepted[0])


def within_limits(participant: Any) -> None:
    """Check an accepted instruction with formulas that do not come from the estimate."""
    config: Config = participant.config
    with torch.device("meta"):
        learner = Learner(torch.nn.Identity(), 16, participant.model, config.ssl)
    parameters = sum(p.numel() for p in learner.parameters())
    assert 4 * 3 * parameters < 200 * 2**20  # weights, gradients and momentum
    assert 4 * 2 * parameters < 20 * 2**20  # two states on disk
    steps = max(1, 32 // config.optim.batch) * config.epochs_of(32)
    assert steps * 2e-3 < 2  # no step of these networks takes less than 2 ms
    assert config.evaluation.epochs * max(1, 32 // config.evaluation.batch) * 1e-4 < 2
    assert config.alignment.memory * 16 * 4 < 200 * 2**20
    assert config.evaluation.batch * 16 * 4 < 200 * 2**20
    assert (config.engine.threads, config.engine.device, config.data.side) == (1, "cpu", 8)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds, changes, rounds)
def test_no_config_crashes_a_node_or_exceeds_its_limits(
    owner: Owner, recorder: Recorder, kind: str, changed: dict[str, Any], number: int
) -> None:
    survives(owner, recorder, kind, changed, number)


def test_other_heads_than_those_that_were_saved_are_refused(owner: Owner) -> None:
    assert not owner.ask("train", with_changes({}), RAD).has_error()
    reason = owner.refusal("train", with_changes({"ssl.predictor": 8}), RAD, round=2)
    assert "networks that clinic saved in round 1 do not fit" in reason
    assert "[ssl] has changed" in reason


@pytest.mark.soak
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds, changes, rounds)
def test_500_configs_are_refused_or_followed(owner: Owner, kind: str, changed: dict[str, Any], number: int) -> None:
    """Accepted instructions are followed here: training and probes with extreme values, too, must end in a reply."""
    reply = owner.ask(kind, with_changes(changed), RAD, round=number)
    if reply.has_error():
        assert reply.error.reason is not None
        assert reply.error.reason.startswith((*REFUSALS, "FloatingPointError: ")), reply.error.reason
    assert sum(f.stat().st_size for f in (owner.home / "state").rglob("*")) < 20 * 2**20

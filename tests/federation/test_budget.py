"""A node estimates what an instruction costs before it starts, and refuses what exceeds its own limits."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from torch import nn

from helpers.instructions import RAD, Owner, tiny
from hetero_ssfl.data import Counts
from hetero_ssfl.errors import ProtocolError
from hetero_ssfl.federation.participants.limits import LimitsConfig, check_costs
from hetero_ssfl.federation.participants.node import open_node
from hetero_ssfl.federation.participants.node_settings import read_node
from hetero_ssfl.federation.wire import fields_of
from hetero_ssfl.learning.encoders import build_encoder
from hetero_ssfl.learning.forward_cost import Work, work_of
from hetero_ssfl.learning.learner import build_learner, count_parameters
from hetero_ssfl.methods.costs import Workload, disk_bytes, evaluation_seconds, memory_bytes, training_seconds


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


# --- instructions that made a node work without end, or filled its memory or disk ---

COSTLY = {
    "a million probe epochs": ("evaluation.epochs=1000000000", "cpu_seconds", "evaluation.epochs = 1000000000"),
    "fine-tuning": (
        "evaluation={finetune_epochs = 1000000000, label_shares = [0.5]}",
        "cpu_seconds",
        "finetune_epochs = 1000000000",
    ),
    "a wide probe": ("evaluation.hidden=1000000000", "memory_mb", "evaluation.hidden = 1000000000"),
    "a huge probe batch": ("evaluation.batch=1000000000", "memory_mb", "batch = 1000000000"),
    "small batches": ("optim.batch=2", "cpu_seconds = 0.1", "local_epochs = 1 with optim.batch = 2"),
    "a wide projector": ("ssl.projector=[20000, 20000]", "memory_mb", "ssl.projector = [20000, 20000]"),
    "a state of 257 MB": ("ssl.projector=[4000, 4000]", "disk_mb = 200", "ssl.projector = [4000, 4000]"),
    "alignment.memory": ("alignment.memory=100000000000", "", "memory = 100000000000"),
    "many views": ("views.count=16", "memory_mb = 1", "views.count = 16"),
}


@pytest.mark.parametrize(("override", "limit", "words"), COSTLY.values(), ids=COSTLY)
def test_what_costs_too_much_is_refused_with_setting_cost_and_limit(
    tmp_path: Path, override: str, limit: str, words: str
) -> None:
    key, given, _ = limit.partition(" = ")
    owner = Owner(tmp_path, limit if given else "")
    reason = owner.refusal("train", tiny(override), RAD)
    assert words in reason
    assert "clinic would need about" in reason
    assert "its limit is" in reason
    assert f"raise limits.{key}" in reason
    assert owner.files() == []


def test_a_long_list_of_label_fractions_is_refused(owner: Owner) -> None:
    fractions = [k / 30_000 for k in range(1, 1_000)]
    config = tiny(f"evaluation.label_shares={fractions}")
    assert "999 evaluation.label_shares, expected at most 20" in owner.refusal("evaluate", config, RAD)


def test_hello_with_large_images_is_refused_before_they_are_resized(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "cache"))
    assert "images of 2048 pixels, the limit of clinic is 512" in owner.refusal("query", tiny(), side=2048)
    assert not (tmp_path / "cache").exists()
    small = Owner(tmp_path / "small", "disk_mb = 1")
    assert "images of side 512" in small.refusal("query", tiny(), side=512)
    assert not list((tmp_path / "cache").glob("*.npy"))
    assert fields_of(owner.ask("query", tiny()).content)["examples"] == 32
    assert list((tmp_path / "cache").glob("*.npy"))


@pytest.mark.parametrize("fields", [{"side": "8"}, {"side": -1}, {"channels": 2}, {"side": 0}, {"side": 10**18}])
def test_hello_with_an_impossible_shape_is_refused(owner: Owner, fields: dict[str, Any]) -> None:
    assert owner.refusal("query", tiny(), **fields).startswith("ProtocolError: the ")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((24, 1, 8, 9), r"shape (24, 1, 8, 9), expected uint8 images"),
        ((0, 1, 8, 8), "expected uint8 images"),
        ((24, 2, 8, 8), "expected uint8 images"),
        ((24, 1, 0, 0), "expected uint8 images"),
        ((24, 1, 600, 600), "images of 600 pixels, the limit of clinic is 512"),
        ((23, 1, 8, 8), "the RAD has 23 images, but the config names rad.size = 24"),
    ],
)
def test_a_rad_of_another_shape_is_refused_and_not_saved(owner: Owner, shape: tuple[int, ...], words: str) -> None:
    assert words in owner.refusal("train", tiny(), torch.zeros(shape, dtype=torch.uint8))
    assert owner.files() == []


def test_a_rad_that_is_no_array_is_refused(owner: Owner) -> None:
    stream = io.BytesIO()
    np.savez(stream, pixels=RAD.numpy())
    zipped = Array("uint8", (24, 1, 8, 8), "numpy.ndarray", stream.getvalue())
    assert "the RAD cannot be read" in owner.refusal("train", tiny(), zipped)
    assert owner.files() == []


@pytest.mark.parametrize("split", ["../../x", "train", "", "all"])
def test_only_known_images_are_evaluated(owner: Owner, split: str) -> None:
    assert "expected validation or test" in owner.refusal("evaluate", tiny(), RAD, round=0, split=split)


# --- what is checked before anything is parsed ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# " + "x" * 300_000, "the server's config has 293 KB, the limit is 64 KB"),
        (f"name = '{'x' * 300_000}'", "the limit is 64 KB"),
        ("seed = " + "[\n" * 10_000, "nested too deeply"),
        ("a." * 20_000 + "b = 1", "a line of 40,005 characters, expected at most 1000"),
        ("a." * 400 + "b = 1", "unknown key 'a'"),
        (f"rounds = '{'x' * 900}'", "rounds = 'xxx"),
        (f"{'x' * 900} = 1", "unknown key 'xxx"),
        ("rad.size = 24\nseed = 9999999999999999999999", "asked for the number 999999999999..., expected at most"),
    ],
    ids=["comments", "a long name", "nested", "a long line", "dotted", "a long value", "a long key", "a large number"],
)
def test_a_config_that_is_costly_to_parse_is_refused(owner: Owner, text: str, words: str) -> None:
    reason = owner.refusal("train", text, RAD)
    assert words in reason
    assert len(reason) <= 1000
    assert owner.files() == []


# --- rounds ---


def test_a_round_beyond_the_run_or_beyond_the_limit_is_refused(owner: Owner) -> None:
    assert "round 999999 of a run of 3 rounds" in owner.refusal("train", tiny(), RAD, round=999_999)
    words = "rounds = 1000000, its limit is 10000"
    assert words in owner.refusal("train", tiny("rounds=1000000"), RAD, round=999_999)
    assert owner.files() == []


def test_a_later_round_does_not_lock_a_node_out_of_its_real_one(owner: Owner) -> None:
    config = tiny("rounds=9000")
    assert not owner.ask("train", config, RAD, round=1).has_error()
    assert not owner.ask("train", config, round=9000).has_error()
    for number in (2, 3, 3, 4):  # round 3 is asked for again, as after a crash of the server
        assert not owner.ask("train", config, round=number).has_error()
    assert [f for f in owner.files() if "round" in f][-1].endswith("round-000004.safetensors")


def test_epochs_that_are_fitted_to_the_steps_are_limited_as_they_would_be_trained(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "local_epochs = 9")
    fitted = {"local_epochs": None, "local_steps": 40}
    alone = tiny("rad.in_ssl=false").model_copy(update=fitted)  # 32 images in batches of 8
    assert "local_epochs = 10, its limit is 9" in owner.refusal("train", alone, RAD)
    with_rad = tiny("rad.in_ssl=true").model_copy(update=fitted)  # 24 images more
    assert not owner.ask("train", with_rad, RAD).has_error()


# --- what the server decides for itself only ---


def test_engine_settings_of_the_server_do_not_reach_a_node(owner: Owner) -> None:
    asked = tiny("engine.threads=1000000", "engine.memory_mb=1000000000", "engine.device=cuda")
    config = open_node(read_node(owner.settings), asked, "0" * 32, RAD).config
    assert config.engine.model_dump(include={"threads", "memory_mb", "device", "workers"}) == {
        "threads": 1,
        "memory_mb": 4096,
        "device": "cpu",
        "workers": 0,
    }


def test_files_of_other_federations_count(tmp_path: Path) -> None:
    owner = Owner(tmp_path, "disk_mb = 2")
    assert not owner.ask("train", tiny(), RAD).has_error()
    (tmp_path / "state" / "federations" / "older").write_bytes(bytes(2 * 2**20))
    assert "its limit is 2 MB; most of it is for its other files" in owner.refusal("train", tiny(), round=2)


def test_whatever_a_handler_raises_becomes_a_reply(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("x" * 5_000)

    monkeypatch.setattr("hetero_ssfl.federation.wire.header_of", broken)
    reason = owner.refusal("train", tiny())
    assert reason.startswith("code: its own code failed with ZeroDivisionError (fault")
    assert len(reason) <= 1000


# --- the estimates, against independent formulas ---


def test_the_work_of_an_encoder_is_counted_without_doing_it() -> None:
    """A convolution with k x k weights takes k^2 * in * out multiply-adds for each output pixel."""
    work = work_of("helpers.instructions:OneConvolution", 3, 400)
    assert work.multiply_adds == 5 * 5 * 3 * 8 * 396**2
    assert (work.width, work.parameters, work.state_bytes) == (8, 608, 4 * 608)
    assert work.largest_bytes == 4 * 8 * 396**2
    encoder, width = build_encoder("resnet8", 3, 32)
    assert work_of("resnet8", 3, 32)[:3:2] == (count_parameters(encoder), width)


def test_an_encoder_that_needs_real_numbers_is_tried_on_blank_images() -> None:
    assert work_of("helpers.instructions:ReadsValues", 1, 8).multiply_adds == 64 * 4


WORK = Workload(Work(1000, 4000, 64, 10**6, 10**5, 10**4, 10), Counts(250, 200, 10), 3, 32)


def test_the_heads_are_counted_as_they_are_built() -> None:
    config = tiny("ssl.projector=[48, 24]", "ssl.predictor=40")
    learner = build_learner(
        config.model_of(0).model_copy(update={"encoder": "resnet8(width=16)"}), config.ssl, 3, 32, 0
    )
    assert learner.projector[0].in_features == WORK.encoder.width
    heads: list[nn.Module] = [learner.projector, learner.predictor]
    saved = sum(t.numel() * t.element_size() for m in [*heads, learner.projector] for t in m.state_dict().values())
    (estimated,) = (v for k, v in disk_bytes(config, WORK).items() if k.startswith("ssl.projector"))
    assert 3 * saved <= estimated <= 1.2 * 3 * saved


def test_costs_follow_the_settings_that_cause_them() -> None:
    base = tiny("optim.batch=100", "local_epochs=10")
    total = {f: sum(f(base, WORK).values()) for f in (training_seconds, evaluation_seconds, memory_bytes, disk_bytes)}

    def factor(what: object, *overrides: str) -> float:
        config = tiny("optim.batch=100", "local_epochs=10", *overrides)
        return sum(what(config, WORK).values()) / total[what]  # type: ignore[index,operator]

    assert 9 < factor(training_seconds, "local_epochs=100") <= 10
    assert factor(training_seconds, "optim.batch=2") > 2
    assert factor(training_seconds, "views.count=8") > 2
    assert factor(evaluation_seconds, "evaluation.epochs=1000") > 10
    assert factor(memory_bytes, "ssl.projector=[8000, 8000]") > 30
    assert factor(disk_bytes, "ssl.projector=[8000, 8000]") > 100


def test_an_accelerator_counts_as_fifty_cores() -> None:
    config, seconds = tiny(), sum(training_seconds(tiny(), WORK).values())
    limits = LimitsConfig(cpu_seconds=seconds / 2)
    with pytest.raises(ProtocolError, match="training in a round"):
        check_costs("clinic", limits, config, WORK)
    check_costs("clinic", limits, config, replace(WORK, accelerated=True))


def test_an_honest_instruction_is_followed(owner: Owner) -> None:
    for kind, number in (("query", 0), ("train", 1), ("evaluate", 1)):
        reply: Message = owner.ask(kind, tiny(), RAD, round=number)
        assert not reply.has_error(), reply.error

"""What a client that lies can do to an average of weights, over the real server loop: be refused, with the reason.

Each attack here was once accepted without a warning and left every probe at chance.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from sklearn.datasets import load_digits
from torch import Tensor

from helpers.federations import write_images
from helpers.rig import Rig, tensors
from helpers.saved import lines
from hetero_ssfl.federation.wire import arrays_of, fields_of, metrics_of, pack
from hetero_ssfl.methods.averaging import average
from hetero_ssfl.methods.weight_checks import misfits
from hetero_ssfl.report.reported_run import read_runs

Weights = dict[str, Tensor]
Lie = Callable[[Weights, Weights], Weights]
"""Takes the global weights and those that the client would send."""

AVERAGING = ("method=fedbyol", "ssl.kind=byol", "evaluation.probes=[]", "evaluation.floors=false")
SMALL = "resnet8(width=4)"


class Liars(Rig):
    """Five equal encoders whose nodes may send weights. `lies` are told from round 1 on, by node."""

    def __init__(self, root: Path, *overrides: str, lies: dict[int, Lie] | None = None, count: int = 5) -> None:
        super().__init__(root, *AVERAGING, *overrides, encoders=(SMALL,) * count)
        self.honest: list[tuple[int, int, Weights]] = []
        """(round, images, weights) of each honest reply."""
        for path in self.paths:
            path.write_text(f"{path.read_text()}[limits]\nweights_may_leave = true\n")
        for number in range(count):
            self.grid.tamper[100 + number] = self.teller((lies or {}).get(number))

    def teller(self, lie: Lie | None) -> Callable[[Message, Message], Message]:
        def tell(question: Message, reply: Message) -> Message:
            number = fields_of(question.content).get("round")
            trains = question.metadata.message_type == "train" and number != 0
            if not trains or reply.has_error() or "need" in fields_of(reply.content):
                return reply
            fields, arrays = fields_of(reply.content), arrays_of(reply.content)
            if lie is None:
                self.honest.append((int(str(number)), int(str(fields["examples"])), arrays))
                return reply
            lied = lie(arrays_of(question.content), arrays)
            return Message(pack(lied, fields, metrics_of(reply.content)), reply_to=question)

        return tell


def with_buffers(end: str, value: float) -> Lie:
    return lambda _, own: {k: torch.full_like(w, value) if k.endswith(end) else w for k, w in own.items()}


def replace_global(target: Weights, count: int) -> Lie:
    """N T - (N - 1) W: the mean of N replies is T, if the others stay close to W. The statistics stay plausible."""

    def lie(current: Weights, own: Weights) -> Weights:
        keys = [k for k, w in own.items() if w.is_floating_point() and "running" not in k]
        return {**own, **{k: count * target[k] - (count - 1) * current[k] for k in keys}}

    return lie


def zeros(current: Weights, own: Weights) -> Weights:
    return replace_global({key: torch.zeros_like(w) for key, w in own.items()}, 5)(current, own)


def turned_round(current: Weights, own: Weights) -> Weights:
    return replace_global({key: -w for key, w in current.items()}, 5)(current, own)


LIES: dict[str, tuple[Lie, str]] = {
    "variances below 0": (with_buffers("running_var", -1e6), "with a variance of -1e+06"),
    "huge means": (with_buffers("running_mean", 1e30), "BatchNorm statistics of scale 1e+30"),
    "means of 100": (with_buffers("running_mean", 100.0), "BatchNorm statistics of scale 100"),
    "a counter below 0": (with_buffers("num_batches_tracked", -1), "with a value of -1"),
    "a counter that overflows": (with_buffers("num_batches_tracked", 2**62), f"with a value of {2**62}"),
    "a model of zeros": (zeros, "weights at a distance of"),
    "the global model turned round": (turned_round, "weights at a distance of"),
}


@pytest.mark.parametrize(("lie", "reason"), LIES.values(), ids=LIES)
def test_a_lie_about_weights_is_refused_by_name_and_changes_nothing(tmp_path: Path, lie: Lie, reason: str) -> None:
    rig = Liars(tmp_path, "rounds=2", lies={1: lie})
    rig.run()
    assert rig.excluded() == [(1, "node-1"), (2, "node-1")]
    told = [e["excluded"] for e in lines(rig.folder) if "excluded" in e]
    assert all(text.startswith("node-1 sent ") and reason in text for text in told)
    last = [(images, weights) for number, images, weights in rig.honest if number == 2]
    expected, found = average([w for _, w in last], [images for images, _ in last]), tensors(rig.folder)
    assert len(last) == 4
    assert all(torch.equal(found[f"shared/{key}"], value) for key, value in expected.items())


def test_the_first_weights_are_checked_too(tmp_path: Path) -> None:
    """A variance of -1 is no larger than that of the others, and the first client's weights are those of all."""
    rig = Liars(tmp_path, "rounds=1", count=3)
    spoil = with_buffers("running_var", -1.0)

    def tamper(question: Message, reply: Message) -> Message:
        if question.metadata.message_type != "train" or fields_of(question.content)["round"] != 0 or reply.has_error():
            return reply
        if "need" in fields_of(reply.content):
            return reply
        return Message(pack(spoil({}, arrays_of(reply.content)), fields_of(reply.content)), reply_to=question)

    rig.grid.tamper[100] = tamper
    rig.run()
    assert rig.excluded() == [(0, "node-0")]
    assert all(float(w.min()) > 0 for key, w in tensors(rig.folder).items() if key.endswith("running_var"))


OPTIMISERS = [(0, "sgd", 0.1), (1, "sgd", 0.1), (2, "sgd", 0.1), (3, "muon", 0.01), (4, "adamw", 0.003)]


@pytest.mark.parametrize(("seed", "kind", "rate"), OPTIMISERS)
def test_honest_clients_with_unlike_images_are_never_refused(tmp_path: Path, seed: int, kind: str, rate: float) -> None:
    """One has eight times as many images, one only two classes, one dark images, one negatives, one noise."""
    rig = Liars(tmp_path, "rounds=2", f"seed={seed}", "local_epochs=1", f"optim.kind={kind}", f"optim.lr={rate}")
    digits, noise = load_digits(), np.random.default_rng(seed)
    pictures = (digits.images * 15.9).astype(np.uint8)
    rows = noise.permutation(len(pictures))
    twos = [row for row in rows if digits.target[row] < 2]
    unlike = [pictures[rows[:240]], pictures[twos[:30]], pictures[rows[300:330]] // 6, 254 - pictures[rows[400:430]]]
    unlike.append(noise.integers(0, 256, (30, 8, 8), dtype=np.uint8))
    for path, images in zip(rig.paths, unlike, strict=True):
        shutil.rmtree(path.parent / "images")
        write_images(path.parent / "images", images, None)
    rig.run()
    assert rig.excluded() == []
    assert len(rig.honest) == 10


def test_two_replies_are_not_compared() -> None:
    """Nobody can say which of two is wrong, and a liar that does not move could have the other one refused."""
    current = {"w": torch.zeros(4)}
    replies = {"a": {"w": torch.ones(4)}, "b": {"w": torch.zeros(4)}}
    assert misfits(current, replies, {"a": 1, "b": 1}) == {}
    still = {**replies, "c": {"w": torch.ones(4)}}
    assert misfits(current, still, dict.fromkeys("abc", 1)) == {}


@pytest.mark.parametrize(("steps", "refused"), [(1, ["d"]), (2, [])])
def test_a_client_may_move_as_far_as_its_steps_allow(steps: int, refused: list[str]) -> None:
    current = {"w": torch.zeros(4)}
    replies = {name: {"w": torch.ones(4)} for name in "abc"} | {"d": {"w": torch.full((4,), -10.0)}}
    assert list(misfits(current, replies, {"a": 1, "b": 1, "c": 1, "d": steps})) == refused


def test_the_trimmed_mean_withstands_one_of_five_liars_within_the_bounds(tmp_path: Path) -> None:
    """Each weight as far as the largest of the others, in the other direction: a lie that is not refused."""

    def lie(now: Weights, own: Weights) -> Weights:
        return {key: w if "running" in key or w.ndim == 0 else now[key] - 4 * (w - now[key]) for key, w in own.items()}

    found = {}
    for trim in (0.0, 0.2):
        rig = Liars(tmp_path / str(trim), "rounds=1", f"averaging.trim={trim}", lies={1: lie})
        rig.run()
        assert rig.excluded() == []
        key = next(key for key, w in rig.honest[0][2].items() if w.ndim == 4)
        found[trim] = tensors(rig.folder)[f"shared/{key}"], torch.stack([w[key] for _, _, w in rig.honest])
    for trim, (result, honest) in found.items():
        low, high = honest.amin(0), honest.amax(0)
        inside = bool(((result >= low - 1e-7) & (result <= high + 1e-7)).all())
        assert inside == (trim > 0)


# --- kernels ---


class OneLiar(Rig):
    """Three encoders, of which the last sends its kernel with permuted images; weights are learned."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "clients.weights=agreement", "evaluation.probes=[]", "rounds=3", "rad.size=40")
        self.grid.tamper[102] = self.lie

    def lie(self, question: Message, reply: Message) -> Message:
        if question.metadata.message_type != "train" or reply.has_error() or "need" in fields_of(reply.content):
            return reply
        factor = arrays_of(reply.content)["factor"].flip(0)
        return Message(pack({"factor": factor}, fields_of(reply.content), metrics_of(reply.content)), reply_to=question)


def stop() -> None:
    raise KeyboardInterrupt


def test_a_liar_about_its_kernel_loses_its_weight_also_in_a_run_that_was_resumed(tmp_path: Path) -> None:
    whole, stopped = OneLiar(tmp_path / "whole"), OneLiar(tmp_path / "stopped")
    whole.run()
    stopped.at["round", 1] = stop
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    stopped.run()
    (seen, again) = ([e for e in lines(rig.folder) if e["event"] == "kernels"] for rig in (whole, stopped))
    assert seen == again
    assert all(event["weights"]["node-2"] < 0.2 for event in seen)
    assert all(event["weights"]["node-0"] == 1.0 for event in seen)
    one, other = tensors(whole.folder), tensors(stopped.folder)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    (run,) = read_runs([whole.folder.path])
    suspects = [(who, why) for _, who, what, why in run.faults() if what == "suspect"]
    assert [who for who, _ in suspects] == ["node-2"]
    assert run.weight_series()["node-2"][0] == (0, 0.0)

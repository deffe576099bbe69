"""Own views, kernels and methods: as objects, by name in a config, as entry points; and which code is trusted."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Generator, Tensor

from helpers.pieces import Net, net
from hetero_ssfl import (
    Client,
    HeteroSSFL,
    Method,
    Run,
    build_encoder,
    factor_cka,
    federate,
    load_config,
    random_view,
    start,
)
from hetero_ssfl.config import AlignmentConfig, Config, ViewsConfig
from hetero_ssfl.data import Images, to_input
from hetero_ssfl.errors import ConfigError, ProtocolError
from hetero_ssfl.federation.participants.node import check_instruction
from hetero_ssfl.federation.participants.node_settings import NodeSettings
from hetero_ssfl.kernels.cka import gram
from hetero_ssfl.kernels.distance import alignment_distance
from hetero_ssfl.kernels.factor import kernel_factor
from hetero_ssfl.methods import method_class
from hetero_ssfl.plugins import Given

EXAMPLES = Path(__file__).parents[2] / "examples"

MODULE = """
import torch
from hetero_ssfl import HeteroSSFL, Local

def dim(batch, rng):
    return batch * 0.5

def rows(a, b):
    return (a @ b.T) ** 2

def apart(learner, views):
    z = [learner.represent(view, "projector") for view in views]
    return (z[0] - z[1]).square().mean() - z[0].std(0).clamp(max=1).mean(), z[0]

def rprop(parameters, lr):
    return torch.optim.Rprop(parameters, lr)

class Quiet(Local):
    name = "quiet"

    def metrics(self, state):
        return {"quiet": 1.0}

not_a_method = Quiet.metrics
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module on the path, and an entry point of a package."""
    folder = tmp_path / "path"
    (folder / "parts-1.0.dist-info").mkdir(parents=True)
    (folder / "parts_of_mine.py").write_text(MODULE)
    (folder / "parts-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    entry = "[hetero_ssfl.methods]\nquiet = parts_of_mine:Quiet\n"
    (folder / "parts-1.0.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "parts_of_mine", raising=False)
    return "parts_of_mine"


def tiny(digits: Images, run_dir: Path, **changes: Any) -> Run:
    federation = [Client(digits.pixels[:40], net()), Client(digits.pixels[40:80], "resnet8(width=4)")]
    settings = {"rounds": 1, "local_epochs": 1}
    return federate(federation, 16, config="smoke", settings=settings, run_dir=run_dir, progress=False, **changes)


@contextmanager
def handed_over(thing: object) -> Iterator[str]:
    """Yield the spec of an object, which can be found within the block."""
    given = Given()
    name = given.spec(thing)
    with given.at_hand():
        yield name


# --- views ---


def test_own_views_get_images_between_0_and_1_before_normalisation(module: str) -> None:
    pixels = torch.tensor([0, 102, 254], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 1, 8, 8)
    config = ViewsConfig(function=f"{module}:dim")
    assert torch.allclose(random_view(pixels, config, Generator()), to_input((pixels / 2).byte()), atol=1e-6)


def test_own_views_get_other_data_unchanged_and_cannot_modify_them(module: str) -> None:
    data = torch.randn(4, 3, 20)
    view = random_view(data, ViewsConfig(function=f"{module}:dim"), Generator())
    assert torch.equal(view, data / 2)

    def spoil(batch: Tensor, rng: Generator) -> Tensor:
        return batch.zero_()

    with handed_over(spoil) as name:
        random_view(data, ViewsConfig(function=name), Generator())
    assert data.abs().min() > 0


def test_own_views_are_used_for_the_local_loss_and_the_rad(digits: Images, tmp_path: Path) -> None:
    sizes = tmp_path / "sizes"

    def watched(batch: Tensor, rng: Generator) -> Tensor:
        with sizes.open("a") as file:
            file.write(f"{len(batch)}\n")
        return batch + 0.1 * torch.randn(batch.shape, generator=rng)

    changes = {"views": watched}
    first, again = (tiny(digits, tmp_path / name, **changes) for name in ("a", "b"))
    seen = sizes.read_text().split()
    assert {"16", "32"} <= set(seen)  # the RAD, and the rest of the 40 images for the local loss
    assert first.table().equals(again.table())


# --- kernels ---


def test_an_own_kernel_is_averaged_and_compared(module: str) -> None:
    a, b = torch.randn(12, 5), torch.randn(12, 7)
    config = AlignmentConfig(
        kernel=f"{module}:rows", distance="cka", row_normalize=False, normalize=False, center=False, power=1.0
    )
    factor = kernel_factor(a, config)
    assert torch.allclose(factor @ factor.T, (a @ a.T).double() ** 2, atol=1e-4)
    expected = 1 - factor_cka(kernel_factor(b, config), factor, center=False)
    assert alignment_distance(b, factor, config) == pytest.approx(float(expected), abs=1e-4)


def test_a_kernel_with_the_wrong_shape_is_refused() -> None:
    def columns(a: Tensor, b: Tensor) -> Tensor:
        return a.T @ a

    expected = r"returned a tensor of shape \(3, 3\) for 5 and 5 rows, expected \(5, 5\)"
    with handed_over(columns) as name, pytest.raises(ConfigError, match=expected):
        gram(torch.ones(5, 3), AlignmentConfig(kernel=name))


# --- methods ---


def test_a_method_is_found_by_name_entry_point_and_class(module: str) -> None:
    assert {method_class(name).name for name in ("quiet", f"{module}:Quiet")} == {"quiet"}
    for name, message in {
        "quite": "the nearest is 'quiet'; expected one of hetero-ssfl, .*quiet, or package.module:Class",
        f"{module}:not_a_method": "is not a subclass of hetero_ssfl.Method",
        f"{module}:gone": "has no callable 'gone'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            method_class(name)


@pytest.mark.parametrize("how", ["class", "name", "entry point"])
def test_an_own_method_runs(how: str, module: str, digits: Images, tmp_path: Path) -> None:
    class Mine(HeteroSSFL):
        def metrics(self, state: object) -> dict[str, float]:
            return {"quiet": 1.0}

    methods: dict[str, str | type[Method]] = {"class": Mine, "name": f"{module}:Quiet", "entry point": "quiet"}
    run = tiny(digits, tmp_path / "r", method=methods[how])
    assert (run.events().query("event == 'round'")["quiet"] == 1).all()


# --- without Python objects ---


def test_own_parts_by_name_work_in_a_config(module: str, tmp_path: Path) -> None:
    own = [f"views.function={module}:dim", f"alignment.kernel={module}:rows", "rounds=1", "evaluation.every=0"]
    own += [f"ssl.kind={module}:apart", f"optim.kind={module}:rprop"]
    folder = start(load_config("smoke", own), tmp_path / "r", lambda _: None)
    assert folder.finished


@pytest.mark.parametrize("key", ["views.function", "alignment.kernel", "ssl.kind", "optim.kind"])
def test_an_invalid_code_name_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} = 'sine' is not possible: it should be .*package.module:callable"):
        load_config("smoke", [f"{key}=sine"])


def test_a_node_imports_only_code_that_its_owner_listed(module: str) -> None:
    config = load_config("smoke", [f"views.function={module}:dim"])
    node = {"name": "clinic", "encoder": "resnet8"}
    with pytest.raises(ProtocolError, match=f"asked to import '{module}:dim', which is not listed in limits.code"):
        check_instruction(NodeSettings.model_validate(node), config, 64)
    assert module not in sys.modules
    limits = {"code": [f"{module}:dim"]}
    check_instruction(NodeSettings.model_validate({**node, "limits": limits}), config, 64)
    for own in ("method=os:system", "alignment.kernel=os:system", "ssl.kind=os:system", "optim.kind=os:system"):
        with pytest.raises(ProtocolError, match="asked to import 'os:system'"):
            check_instruction(NodeSettings.model_validate({**node, "limits": limits}), load_config("smoke", [own]), 64)


def test_error_for_a_missing_object_names_the_remedy() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'given:gone' is a Python object that does not exist .* Call where it was passed: federate\(",
    ):
        random_view(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), ViewsConfig(function="given:gone"), Generator())
    assert Config(method="given:Gone").method == "given:Gone"


@pytest.mark.parametrize("example", ["sensors.py --quick", "own_everything.py"])
def test_examples_run(example: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *str(EXAMPLES / example).split()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "linear_all" in done.stdout


def test_every_client_trains_its_own_copy_of_an_instance() -> None:
    one = net()
    with handed_over(one) as name:
        first, second = (cast(Net, build_encoder(name, 1, 16)[0]) for _ in range(2))
    with torch.no_grad():
        first.conv.weight.zero_()
    assert torch.equal(second.conv.weight, net().conv.weight)


def test_clients_with_one_instance_can_average_its_weights(digits: Images, tmp_path: Path) -> None:
    one = net()
    federation = [Client(digits.pixels[:40], one), Client(digits.pixels[40:80], one)]
    settings = {"clients.per_round": 1.0, "local_epochs": 1}
    run = federate(federation, 8, "fedbyol", config="smoke", settings=settings, run_dir=tmp_path / "r", progress=False)
    assert list(run.table()["encoder"]) == ["Net", "Net"]


class Scaled(Net):
    """A network whose factor is neither a weight nor part of its repr."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.load_state_dict(net().state_dict())
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def test_instances_with_the_same_description_are_kept_apart(digits: Images, tmp_path: Path) -> None:
    runs: list[Run] = []
    for factors in ((1.0, 2.0), (3.0, 4.0)):
        federation = [Client(digits.pixels[40 * k : 40 * k + 40], Scaled(f)) for k, f in enumerate(factors)]
        run_dir = tmp_path / str(len(runs))
        runs.append(federate(federation, 8, config="smoke", rounds=1, run_dir=run_dir, progress=False))
    assert [[cast(Scaled, run.encoder(k)).factor for k in range(2)] for run in runs] == [[1.0, 2.0], [3.0, 4.0]]
    assert list(runs[0].table()["encoder"]) == ["Scaled", "Scaled"]


def test_functions_with_the_same_name_have_their_own_parameter_count(digits: Images, tmp_path: Path) -> None:
    counts = []
    for width in (5, 9):
        federation = [Client(digits.pixels[40 * k : 40 * k + 40], lambda w=width: Net(width=w)) for k in range(2)]
        run_dir = tmp_path / str(width)
        settings = {"engine.threads": 2}  # trains in this process
        run = federate(federation, 8, config="smoke", rounds=1, settings=settings, run_dir=run_dir, progress=False)
        counts += run.table()["parameters"].tolist()
    expected = [sum(p.numel() for p in Net(width=width).parameters()) for width in (5, 5, 9, 9)]
    assert counts == expected


def test_a_class_or_a_function_can_be_the_encoder(digits: Images, tmp_path: Path) -> None:
    federation = [Client(digits.pixels[:40], Net), Client(digits.pixels[40:80], lambda: Net(width=5))]
    run = federate(federation, 8, config="smoke", rounds=1, run_dir=tmp_path / "r", progress=False)
    assert list(run.table()["encoder"]) == [
        "helpers.pieces:Net",
        "test_a_class_or_a_function_can_be_the_encoder.lambda",
    ]
    assert cast(Net, run.encoder(1)).out.out_features == 5

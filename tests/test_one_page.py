"""examples/one_page.py and the package compute the same kernels, losses and rounds."""

import copy
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hetero_ssfl.config import AlignmentConfig, Config, ModelConfig, SslConfig, validate
from hetero_ssfl.data import random_view
from hetero_ssfl.kernels.contribution import contribution
from hetero_ssfl.kernels.coordinates import coordinates
from hetero_ssfl.kernels.distance import alignment_distance
from hetero_ssfl.kernels.mean import combine
from hetero_ssfl.learning.learner import Learner
from hetero_ssfl.learning.losses.byol import byol
from hetero_ssfl.learning.training import TrainingClient
from hetero_ssfl.methods import method_for
from hetero_ssfl.methods.base import Broadcast
from hetero_ssfl.seeding import rng_for

PAGE = Path(__file__).parents[1] / "examples" / "one_page.py"
CLIENTS = ["deep CNN", "flat CNN", "MLP"]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_page", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(page: ModuleType) -> Config:
    """A config that makes the package do the same as the page."""
    return validate(
        {
            "local_epochs": 2,
            "rad": {"size": 60, "in_ssl": False},
            "ssl": {"kind": "byol", "projector": [128, 64], "predictor": 128, "ema": page.EMA},
            "optim": {
                "kind": "sgd",
                "lr": page.LR,
                "momentum": page.MOMENTUM,
                "weight_decay": page.WEIGHT_DECAY,
                "batch": 16,
                "schedule": "constant",
                "warmup": 0.0,
            },
            "alignment": {"distance": "cka", "mu": page.MU["CKA"], "rad_batch": 40, "ten_crop": False, "own_images": 0},
        },
        Config,
    )


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8, generator=rng_for(0, "pixels"))


@pytest.fixture
def rad(config: Config) -> Tensor:
    return torch.randint(0, 256, (config.rad.size, 1, 8, 8), dtype=torch.uint8, generator=rng_for(0, "rad"))


def networks(page: ModuleType) -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    found: dict[str, torch.nn.Module] = page.different_encoders()
    return found


def as_learner(net: torch.nn.Module, ssl: SslConfig) -> Learner:
    """Build the package's learner from a copy of the page's networks."""
    first = net.get_submodule("projector.0")
    assert isinstance(first, torch.nn.Linear)
    encoder = copy.deepcopy(net.get_submodule("encoder"))
    learner = Learner(encoder, first.in_features, ModelConfig(encoder="page"), ssl, coordinates=32)
    learner.load_state_dict(net.state_dict())
    return learner


def smooth(module: torch.nn.Module) -> torch.nn.Module:
    """Replace every ReLU by GELU: at the kink of a ReLU, the last bit decides the slope, and equal programs diverge."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.ReLU):
                setattr(parent, name, torch.nn.GELU())
    return module


def representations(width: int) -> Tensor:
    return torch.randn(60, width, generator=rng_for(0, "representations", width)) + 0.5


def kernel(factor: Tensor) -> Tensor:
    return factor @ factor.T


def same(one: Tensor, other: Tensor, atol: float = 1e-5) -> bool:
    return torch.allclose(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("width", [1, 7, 59, 96])  # 96 is more than the RAD has rows
def test_a_client_sends_the_same_kernel(page: ModuleType, width: int) -> None:
    a = representations(width)
    assert same(kernel(page.factor(a)), kernel(contribution(a, AlignmentConfig()).arrays["factor"]))


def test_a_different_power_gives_a_different_kernel(page: ModuleType) -> None:
    a = representations(7)
    assert not same(kernel(page.factor(a)), kernel(contribution(a, AlignmentConfig(power=1.0)).arrays["factor"]))


def test_the_server_computes_the_same_consensus(page: ModuleType) -> None:
    factors, weights = (
        [contribution(representations(d), AlignmentConfig()).arrays["factor"] for d in (7, 12, 30)],
        [0.5, 0.3, 0.2],
    )
    ours = kernel(page.consensus(factors, weights))
    assert same(ours, kernel(combine(factors, weights).factor))
    assert same(ours, sum((w * kernel(a) for a, w in zip(factors, weights, strict=True)), torch.zeros(60, 60)))
    assert not same(ours, kernel(combine(factors, weights[::-1]).factor))


def test_the_alignment_distance_is_the_same(page: ModuleType) -> None:
    live, wanted = representations(12), page.factor(representations(30))
    ours = 1 - page.cka(torch.nn.functional.normalize(live, dim=1), wanted)
    assert same(ours, alignment_distance(live, wanted, AlignmentConfig(distance="cka")))
    assert not same(ours, alignment_distance(live.flip(0), wanted, AlignmentConfig(distance="cka")), 1e-3)


@pytest.mark.parametrize("name", CLIENTS)
def test_the_byol_loss_is_the_same(page: ModuleType, config: Config, pixels: Tensor, name: str) -> None:
    net = networks(page)[name]
    learner = as_learner(net, config.ssl)
    view_1, view_2 = (random_view(pixels, config.views, rng_for(0, "view", k)) for k in range(2))
    ours = page.byol_loss(net, view_1, view_2)
    assert same(ours, byol(learner, [view_1, view_2])[0])
    assert not same(ours, byol(learner, [view_1, view_2.flip(0)])[0], 1e-3)


def test_the_coordinates_are_the_same(page: ModuleType) -> None:
    b = page.consensus([page.factor(representations(d)) for d in (7, 12, 30)], [1 / 3] * 3)
    first, later = page.coordinates(b), page.coordinates(b.flip(0), last=page.coordinates(b))
    signs = (first * coordinates(b, page.COLUMNS, page.POWER)).sum(0).sign()  # those of an SVD are arbitrary
    assert same(first, coordinates(b, page.COLUMNS, page.POWER) * signs)
    assert same(later, coordinates(b.flip(0), page.COLUMNS, page.POWER, first), 1e-4)


@pytest.mark.parametrize("term", ["CKA", "coordinates"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_round_has_the_same_steps_and_the_same_consensus(
    page: ModuleType, config: Config, pixels: Tensor, rad: Tensor, name: str, term: str
) -> None:
    chosen = {"distance": term.lower(), "mu": page.MU[term], "coordinates": page.COLUMNS}
    config = config.model_copy(update={"alignment": config.alignment.model_copy(update=chosen)})
    nets = {other: smooth(net) for other, net in networks(page).items()}
    clean = rad.float() / 255 * 4 - 2
    factors = {other: page.rad_factor(net, clean) for other, net in nets.items()}
    weights = [1 / 3] * 3
    b = page.consensus(list(factors.values()), weights)
    wanted = b if term == "CKA" else page.coordinates(b)

    package_losses: list[float] = []
    learner = as_learner(nets[name], config.ssl)
    smooth(learner)
    client = TrainingClient("c", config, learner, pixels, rad, progress=lambda _, loss: package_losses.append(loss))
    reply = method_for(config).local_update(
        client, Broadcast(1, {"factor" if term == "CKA" else "coordinates": wanted})
    )

    page_losses = steps_of_the_page(page, nets[name], config, pixels, rad, wanted, term)
    assert len(page_losses) == 8
    assert page_losses == pytest.approx(package_losses, abs=1e-5)
    assert page_losses[-1] != pytest.approx(page_losses[0], abs=1e-2)  # training changed the loss

    theirs = combine([*others(factors, name), reply.arrays["factor"]], weights).factor
    ours = page.consensus([*others(factors, name), page.rad_factor(nets[name], clean)], weights)
    assert same(kernel(ours), kernel(theirs), 1e-4)
    before = page.consensus([*others(factors, name), factors[name]], weights)
    assert not same(kernel(ours), kernel(before), 1e-3)


def steps_of_the_page(
    page: ModuleType, net: torch.nn.Module, config: Config, pixels: Tensor, rad: Tensor, wanted: Tensor, term: str
) -> list[float]:
    """Run round 1 of client "c" with the page's loss and step, on the package's random views."""
    losses, optimiser = [], page.sgd(net.train())
    for epoch in range(config.epochs_of(len(pixels))):
        scope = ("train", "c", 1, epoch)
        rng, rng_rad = rng_for(config.seed, *scope), rng_for(config.seed, *scope, "regulariser")
        for batch in torch.randperm(len(pixels), generator=rng).split(config.optim.batch):
            views = tuple(random_view(pixels[batch], config.views, rng) for _ in range(2))
            rows = torch.randperm(len(rad), generator=rng_rad)[: config.alignment.rad_batch]
            rad_views = random_view(rad[rows], config.views, rng_rad)
            loss = page.local_loss(net, views, rad_views, wanted, rows, term)
            page.training_step(net, optimiser, loss)
            losses.append(loss.item())
    return losses


def others(factors: dict[str, Tensor], name: str) -> list[Tensor]:
    return [factor for other, factor in factors.items() if other != name]

"""One round on an accelerator: no tensor is left on the CPU, and no step waits for the accelerator.

Run by test_accelerator.py in a separate process, because a device cannot be unregistered from torch.
"""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from helpers.pretend import DEVICE, Accelerator
from hetero_ssfl.config import Config, load_config
from hetero_ssfl.data import Images
from hetero_ssfl.federation.client.memory import move_images
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.learning.finetune import finetune
from hetero_ssfl.learning.learner import build_learner
from hetero_ssfl.learning.training import STEPS_BETWEEN_READS, TrainingClient
from hetero_ssfl.methods import Broadcast, ServerState, Update, method_for
from hetero_ssfl.seeding import rng_for


class Little(nn.Sequential):
    """A small encoder, for checks that do not depend on the encoder."""

    def __init__(self, in_channels: int) -> None:
        layers = (nn.Conv2d(in_channels, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        super().__init__(*layers)


LITTLE = f"{__name__}:Little"
FAMILIES = ("resnet8(width=4)", "resnet50(width=2)", "mobilenet(width=4, depth=1)", "vit(width=8, depth=1, heads=2)")
TINY = [
    "optim.batch=12",
    "local_epochs=1",
    "rounds=2",
    "rad.size=24",
    "alignment.rad_batch=16",
    "ssl.projector=[16, 8]",
    "ssl.predictor=16",
]


def tiny(*overrides: str) -> Config:
    return load_config("smoke", [*TINY, *overrides])


def images(*scope: str, count: int = 24) -> Tensor:
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=rng_for(0, *scope))


def make_client(config: Config, encoder: str = LITTLE, count: int = 24) -> TrainingClient:
    """Build a client on the CPU, with labels if the method needs them."""
    kind = type(method_for(config))
    model = config.model_of(0).model_copy(update={"encoder": encoder})
    head = config.alignment.coordinates if config.alignment.distance == "coordinates" else None
    classes = 3 if kind.needs_labels else None
    learner = build_learner(model, config.ssl, 3, 16, 0, classes=classes, coordinates=head)
    labels = torch.arange(count) % 3 if kind.needs_labels else None
    return TrainingClient("client-000", config, learner, images("own", count=count), images("rad"), labels)


def play(client: TrainingClient, rounds: int) -> tuple[Update, dict[str, Tensor]]:
    """Run the opening and some rounds with one client. Return its last reply and its networks."""
    method = method_for(client.config)
    state = ServerState(-1 if method.opening != "nobody" else 0, (client.name,))
    update = Update(0)
    while state.round < rounds:
        down: Broadcast = method.broadcast(state, client.name)
        method.check_broadcast(client, down)
        update = method.local_update(client, down.to(client.device))
        update = dataclasses.replace(update, arrays={k: v.cpu() for k, v in update.arrays.items()})
        method.check(state, client.name, update)
        state = method.aggregate(state, {client.name: update})
    return update, {k: v.cpu() for k, v in client.learner.state_dict().items()}


def there(client: TrainingClient, resident: bool) -> TrainingClient:
    """Move a client's networks, and optionally its images, to the accelerator."""
    moved = dataclasses.replace(client, learner=copy.deepcopy(client.learner).to(DEVICE))
    move_images(moved, 2**30 if resident else 0)
    assert (moved.pixels.device == DEVICE) is resident
    return moved


def assert_same_on_the_accelerator(
    config: Config, encoder: str = LITTLE, rounds: int = 1, resident: bool = True
) -> None:
    client = make_client(config, encoder)
    with Accelerator():
        sent, networks = play(there(client, resident), rounds)
    here, networks_here = play(client, rounds)
    for name, value in networks_here.items():
        torch.testing.assert_close(networks[name], value, rtol=1e-4, atol=1e-5)
    for name, metric in here.metrics.items():
        assert sent.metrics[name] == pytest.approx(metric, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("encoder", FAMILIES)
def test_every_encoder_trains_on_the_accelerator(encoder: str) -> None:
    assert_same_on_the_accelerator(tiny(), encoder)


def test_simsiam_trains_on_the_accelerator_with_images_that_stay_on_the_cpu() -> None:
    assert_same_on_the_accelerator(tiny("ssl.kind=simsiam"), FAMILIES[0], resident=False)


@pytest.mark.parametrize(
    "settings",
    [
        ["alignment.distance=relational-kl", "alignment.memory=16", "views.blur=0.5"],
        ["alignment.distance=literal-cka", "alignment.center=false", "views.solarize=0.5"],
        ["alignment.kernel=rbf", "alignment.rad_batch=0", "views.rotate=10"],
        ["alignment.kernel=polynomial", "alignment.layer=predictor", "alignment.augment_rad=false"],
        ["alignment.estimator=debiased", "alignment.when=epoch", "rad.in_ssl=true"],
        ["alignment.form=sketch", "optim.clip_norm=1.0", "alignment.every=2"],
        ["alignment.distance=coordinates", "rad.in_ssl=true"],
        ["alignment.distance=coordinates", "alignment.form=sketch", "alignment.coordinates=5"],
        ["ssl.kind=vicreg", "views.count=3", "optim.kind=adamw"],
        ["ssl.kind=simclr", "optim.kind=lars", "ssl.ema_end=1.0"],
        ["ssl.kind=simclr", "optim.kind=muon"],
        ["ssl.kind=barlow-twins", "optim.warmup=1"],
    ],
    ids=" ".join,
)
def test_every_variant_of_a_step_stays_on_its_device(settings: list[str]) -> None:
    assert_same_on_the_accelerator(tiny(*settings))


@pytest.mark.parametrize("method", ["local", "fedssl", "fedbyol", "fedu", "fedema", "fedavg", "fedsimsiam"])
def test_every_method_trains_on_the_accelerator(method: str) -> None:
    kind = "simsiam" if method == "fedsimsiam" else "byol"
    assert_same_on_the_accelerator(
        tiny(f"method={method}", f"ssl.kind={kind}", "clients.models=['resnet8(width=4)']"), rounds=2
    )


def test_features_and_fine_tuning_return_to_the_cpu() -> None:
    config = tiny()
    client = make_client(config)
    pictures = Images(images("own"), torch.arange(24) % 3, ("a", "b", "c"))
    here = extract_features(client.learner.encoder, pictures.pixels)
    tuned = finetune(client.learner.encoder, pictures, pictures, config.evaluation, 0)
    with Accelerator():
        encoder = there(client, True).learner.encoder
        features = extract_features(encoder, pictures.pixels)
        assert finetune(encoder, pictures, pictures, config.evaluation, 0) == pytest.approx(tuned, abs=5)
    assert features.device.type == "cpu"
    torch.testing.assert_close(features, here, rtol=1e-4, atol=1e-5)


def test_a_tensor_left_on_the_cpu_is_detected() -> None:
    """The check itself works: images on the CPU cannot be used with networks on the accelerator."""
    client = make_client(tiny())
    with Accelerator(), pytest.raises(RuntimeError, match=r"expected all tensors of .* on one device"):
        there(client, True).learner.encoder(torch.zeros(2, 3, 16, 16))


@pytest.mark.parametrize("resident", [True, False])
def test_a_step_does_not_wait_for_the_accelerator(resident: bool) -> None:
    """The number of waits in a round does not depend on its number of steps, except for occasional loss reports."""
    waits = []
    for epochs in (1, 4):
        client = make_client(tiny(f"local_epochs={epochs}"))
        with Accelerator() as accelerator:
            moved = there(client, resident)
            method = method_for(client.config)
            accelerator.waits.clear()
            down = Broadcast(1, {"factor": torch.randn(24, 8, generator=rng_for(0, "factor"))}).to(DEVICE)
            method.local_update(moved, down)
        looks = epochs * -(-(24 // 12) // STEPS_BETWEEN_READS)
        accelerator.waits["_local_scalar_dense"] -= looks
        waits.append(dict(accelerator.waits))
    assert waits[0] == waits[1]
    assert sum(waits[0].values()) < 10

"""Any module that maps images to vectors is an encoder; anything else is refused."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from hetero_ssfl.errors import ConfigError
from hetero_ssfl.learning.encoders import BUILTIN, build_encoder, list_encoders, parse_spec
from hetero_ssfl.learning.learner import count_parameters
from hetero_ssfl.seeding import global_seed, rng_for

SMALL = {
    "resnet50": "resnet50(width=2)",
    "mobilenet": "mobilenet(width=4, depth=1)",
    "vit": "vit(width=8, depth=1, heads=2)",
}


def seeded(spec: str, channels: int, side: int, seed: int = 0) -> tuple[torch.nn.Module, int]:
    with global_seed(seed, "encoder"):
        return build_encoder(spec, channels, side)


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def refusal(spec: str, channels: int = 3, side: int = 16) -> str:
    with pytest.raises(ConfigError) as caught:
        build_encoder(spec, channels, side)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("side", [16, 32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", BUILTIN)
def test_every_encoder_maps_images_to_vectors(name, channels, side):
    spec = SMALL.get(name, f"{name}(width=4)")
    encoder, width = seeded(spec, channels, side)
    assert encoder.training
    rng = rng_for(0, "images")
    out = encoder(torch.randn(5, channels, side, side, generator=rng))
    assert out.shape == (5, width)
    assert out.isfinite().all()
    assert (out.std(0) > 0).any()  # the output depends on the image

    (out * torch.randn(5, width, generator=rng)).sum().backward()
    assert [key for key, p in encoder.named_parameters() if p.grad is None or not p.grad.any()] == []

    again, other = (seeded(spec, channels, side, seed)[0] for seed in (0, 1))
    assert torch.equal(weights(again), weights(encoder))
    assert not torch.equal(weights(other), weights(encoder))


def test_resnet18_is_the_standard_one_with_a_small_stem_and_no_classifier():
    encoder, width = build_encoder("resnet18", 3, 32)

    def conv_and_norm(inputs: int, outputs: int, kernel: int) -> int:
        return inputs * outputs * kernel**2 + 2 * outputs

    by_hand = conv_and_norm(3, 64, 3) + 4 * conv_and_norm(64, 64, 3)
    for n in (128, 256, 512):
        by_hand += conv_and_norm(n // 2, n, 3) + 3 * conv_and_norm(n, n, 3) + conv_and_norm(n // 2, n, 1)
    assert count_parameters(encoder) == by_hand == 11_168_832
    assert width == 512


@pytest.mark.parametrize(("name", "layers"), [("resnet8", 8), ("resnet10", 10), ("resnet14", 14), ("resnet18", 18)])
def test_a_resnet_has_the_depth_in_its_name(name, layers):
    encoder, _ = build_encoder(f"{name}(width=2)", 3, 16)
    kernels = [m.kernel_size for m in encoder.modules() if isinstance(m, torch.nn.Conv2d)]
    assert kernels.count((3, 3)) + 1 == layers  # plus the classification layer


def test_a_resnet_keeps_the_full_size_through_its_first_stage():
    encoder, _ = build_encoder("resnet18(width=2)", 3, 32)
    sizes: list[int] = []
    assert isinstance(encoder.layers, torch.nn.Sequential)
    for layer in encoder.layers:
        layer.register_forward_hook(lambda _module, _inputs, out: sizes.append(out.shape[-1]))
    encoder(torch.zeros(2, 3, 32, 32))
    assert sizes == [32, 32, 32, 32, 16, 16, 8, 8, 4, 4]


def test_a_vision_transformer_distinguishes_positions():
    encoder, _ = seeded("vit(width=8, depth=1, heads=2)", 1, 8)
    corner = torch.zeros(2, 1, 8, 8)
    corner[0, :, :4, :4] = 1
    corner[1, :, 4:, 4:] = 1
    first, second = encoder(corner)
    assert not torch.allclose(first, second, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("vit", "vit", {}),
        (" vit ", "vit", {}),
        ("vit()", "vit", {}),
        ("vit(width=8)", "vit", {"width": 8}),
        ("vit( width = 8, heads=2 )", "vit", {"width": 8, "heads": 2}),
        ("timm:convnext(drop=0.5, act='relu', ok=True)", "timm:convnext", {"drop": 0.5, "act": "relu", "ok": True}),
        ("my.package:net(sizes=(1, 2))", "my.package:net", {"sizes": (1, 2)}),
    ],
)
def test_a_description_is_parsed(spec, name, options):
    assert parse_spec(spec) == (name, options)


@pytest.mark.parametrize(
    "spec", ["vit(8)", "vit(width=8", "vit(width=)", "vit(width=open)", "vit(width=8) + 1", "vit(("]
)
def test_an_error_about_a_malformed_description_gives_an_example(spec):
    message = refusal(spec)
    assert f"'{spec}'" in message
    assert "resnet10(width=16)" in message


def test_options_reach_the_encoder():
    assert build_encoder("resnet10(width=4)", 3, 16)[1] == 32
    assert build_encoder("vit(width=12, heads=2, depth=1)", 3, 16)[1] == 12


def test_an_error_about_an_unknown_encoder_suggests_the_nearest():
    message = refusal("mobilnet(width=4)")
    assert "unknown encoder 'mobilnet', 'mobilenet' is the nearest" in message
    assert "timm:NAME" in message
    assert "expected one of resnet8, resnet10" in refusal("zzz")


def test_an_error_about_an_unknown_option_lists_the_known_ones():
    assert "no option 'wdith', expected one of: width, stem, whiten, pool." in refusal("resnet10(wdith=4)")
    assert "no option 'layers', expected one of: width, depth, heads, patch, whiten, pool." in refusal("vit(layers=4)")


def test_patches_must_divide_the_side():
    assert "patch = 4 does not divide the image side 18" in refusal("vit", side=18)
    assert build_encoder("vit(patch=6, width=6, depth=1)", 3, 18)[1] == 6


@pytest.mark.parametrize(
    "spec", ["resnet10(width=-1)", "resnet10(width='a')", "vit(width=8, heads=3)", "mobilenet(expand=0)"]
)
def test_an_impossible_option_is_refused(spec):
    assert f"encoder '{spec}' cannot be built" in refusal(spec)


def test_patches_of_size_zero_are_refused():
    assert "cannot be built" in refusal("vit(patch=0)")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_an_error_about_a_missing_library_says_how_to_install_it(library):
    if importlib.util.find_spec(library):
        pytest.skip(f"{library} is installed")
    message = refusal(f"{library}:resnet18")
    assert f"cannot import {library}" in message
    assert "pip install" in message


class Hub(SimpleNamespace):
    """Stands for timm, which needs torchvision."""

    made: list[str]

    def create_model(self, name: str, pretrained: bool = False, **options: object) -> torch.nn.Module:
        self.made.append(f"{name} {pretrained}")
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5))

    def get_pretrained_cfg(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(hf_hub_id=f"timm/{name}")


def test_trained_weights_that_cannot_be_had_are_refused_before_timm_tries(tmp_path, monkeypatch):
    from huggingface_hub import constants

    hub = Hub(made=[])
    monkeypatch.setitem(sys.modules, "timm", hub)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    message = refusal("timm:resnet18.a1_in1k(pretrained=True)", side=8)
    assert "timm:resnet18.a1_in1k are not on this machine" in message
    assert "leave pretrained=True out" in message
    assert not hub.made
    build_encoder("timm:resnet18.a1_in1k", 1, 8)
    snapshot = tmp_path / "models--timm--resnet18.a1_in1k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    build_encoder("timm:resnet18.a1_in1k(pretrained=True)", 1, 8)
    assert hub.made == ["resnet18.a1_in1k False", "resnet18.a1_in1k True"]


def refuse(*_: object, **__: object) -> None:
    raise ConnectionError


@pytest.fixture
def my_encoders(tmp_path, monkeypatch):
    (tmp_path / "my_encoders.py").write_text(
        """
from torch import nn

class Flat(nn.Module):
    def __init__(self, in_channels, side, width=7):
        super().__init__()
        self.linear = nn.Linear(in_channels * side * side, width)
    def forward(self, x):
        return self.linear(x.flatten(1))

class Pair(nn.Identity):
    def forward(self, x):
        return x.flatten(1), x

class Moody(nn.Module):
    def forward(self, x):
        raise KeyError("not today")

class Wordy(nn.Module):
    def forward(self, x):
        raise ValueError("one line\\nand another")

class Lazy(nn.Flatten):
    def __init__(self):
        super().__init__()
        self.eval()

def anything(**options):
    return nn.Flatten(**options)

def number():
    return 3

def absent():
    raise KeyError("weights")

constant = 3
"""
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_encoders")
def test_any_callable_that_returns_a_module_is_an_encoder():
    encoder, width = build_encoder("my_encoders:Flat(width=5)", 3, 8)
    assert width == 5
    assert encoder(torch.zeros(4, 3, 8, 8)).shape == (4, 5)
    assert build_encoder("my_encoders:Flat", 1, 4)[1] == 7
    assert build_encoder("my_encoders:anything(start_dim=1)", 3, 8)[1] == 192


@pytest.mark.usefixtures("my_encoders")
def test_the_dry_run_leaves_the_mode_as_it_was():
    assert build_encoder("my_encoders:Flat", 3, 8)[0].training
    assert not build_encoder("my_encoders:Lazy", 3, 8)[0].training


@pytest.mark.usefixtures("my_encoders")
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("my_encoders:Pair", "maps a batch of 2 to a tuple, expected a tensor of shape (2, width). Return only its"),
        (
            "torch.nn:Identity",
            "maps a batch of 2 to a tensor of shape (2, 3, 16, 16), expected a tensor of shape (2, width)",
        ),
        ("torch.nn:Flatten(start_dim=0)", "a tensor of shape (1536,)"),
        ("my_encoders:Moody", "fails on images of shape (3, 16, 16): 'not today'"),
        ("my_encoders:number", "returned int, expected a torch.nn.Module"),
        ("my_encoders:constant", "module my_encoders has no callable 'constant'"),
        ("my_encoders:gone", "module my_encoders has no callable 'gone'"),
        ("my_encoders:Flat(depth=2)", "no option 'depth', expected one of: width."),
        ("no_such_module:Flat", "cannot import no_such_module"),
        ("my_encoders:absent", "cannot be built"),
        ("my_encoders:Wordy", "one line"),
    ],
)
def test_a_callable_that_is_not_an_encoder_is_refused(spec, reason):
    assert reason in refusal(spec)


def test_encoders_are_listed_by_pattern_with_those_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(list_models=lambda: ["vit_tiny", "convnext"]))
    assert list_encoders("*vit*") == ["vit", "timm:vit_tiny"]
    assert set(list_encoders()) == {*BUILTIN, "timm:vit_tiny", "timm:convnext"}
    monkeypatch.setitem(sys.modules, "timm", None)  # not installed
    assert list_encoders("*vit*") == ["vit"]

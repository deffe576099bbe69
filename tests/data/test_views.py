"""Views follow the settings: compared with mirrored and shifted images and with colours computed pixel by pixel."""

import math

import numpy as np
import pytest
import torch

from hetero_ssfl.config import ViewsConfig
from hetero_ssfl.data import random_view, ten_crop, to_input, views
from hetero_ssfl.seeding import rng_for

OFF = {"crop": (1.0, 1.0), "flip": 0.0, "jitter": 0.0, "grayscale": 0.0}
ALL = ViewsConfig(rotate=30, translate=0.2, shear=10, blur=0.5, solarize=0.3)


def noise(n: int = 6, channels: int = 3, side: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, side, side), generator=rng_for(0, "noise"), dtype=torch.uint8)


def view(pixels: torch.Tensor, config: ViewsConfig | None = None, seed: int = 0, **settings) -> torch.Tensor:
    return random_view(pixels, config or ViewsConfig(**{**OFF, **settings}), rng_for(seed, "views"))


def in_unit_range(x: torch.Tensor) -> torch.Tensor:
    """Convert network input back to [0, 1]."""
    return x * views.STD + views.MEAN


@pytest.fixture
def midway(monkeypatch):
    """Replace every uniform number by the middle of its range, or by the number given for that range."""

    def choose(numbers: dict[tuple[float, float], float] | None = None) -> None:
        def uniform(self, low, high):
            return torch.full((self.n,), (numbers or {}).get((low, high), (low + high) / 2))

        monkeypatch.setattr(views._Draw, "uniform", uniform)

    return choose


@pytest.fixture
def drawn(monkeypatch):
    """Return the uniform numbers that were drawn, by range."""
    numbers: dict[tuple[float, float], torch.Tensor] = {}
    original = views._Draw.uniform

    def uniform(self, low, high):
        numbers[low, high] = original(self, low, high)
        return numbers[low, high]

    monkeypatch.setattr(views._Draw, "uniform", uniform)
    return numbers


def test_network_input_has_fixed_mean_and_scale():
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    assert to_input(pixels).flatten().tolist() == pytest.approx([-2, -1.2, 2])
    assert pixels.flatten().tolist() == [0, 51, 255]


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_16_bits_give_the_views_of_8_bits(channels):
    pixels = noise(channels=channels)
    deep = torch.from_numpy(pixels.numpy().astype(np.uint16) * 257)  # 255 becomes 65535
    assert torch.allclose(to_input(deep), to_input(pixels), atol=1e-6)
    assert torch.allclose(view(deep, ALL), view(pixels, ALL), atol=1e-4)


def test_without_colours_only_brightness_and_contrast_change(drawn):
    """Five channels keep their ratios to each other: the formula uses one mean for all of them."""
    pixels = noise(channels=5)
    got = in_unit_range(view(pixels, jitter=1.0, grayscale=1.0, brightness=0.3, contrast=0.2, saturation=0.4, hue=0.1))
    bright, contrast = (drawn[1 - spread, 1 + spread].double().numpy() for spread in (0.3, 0.2))
    for k, image in enumerate(pixels.double().numpy() / 255):
        wanted = bright[k] * (image.mean() + contrast[k] * (image - image.mean()))
        assert np.allclose(got[k], wanted.clip(0, 1), atol=1e-5)


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_a_view_has_the_shape_of_its_image_and_stays_in_range(channels):
    pixels = noise(channels=channels)
    got = view(pixels, ALL)
    assert (got.shape, got.dtype) == (pixels.shape, torch.float32)
    assert got.isfinite().all()
    assert got.min() >= -2
    assert got.max() <= 2
    assert torch.equal(pixels, noise(channels=channels))


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_only_the_generator_determines_a_view(channels):
    pixels = noise(channels=channels)
    torch.manual_seed(1)
    first = view(pixels, ALL)
    torch.manual_seed(2)
    assert torch.equal(view(pixels, ALL), first)
    assert not torch.equal(view(pixels, ALL, seed=1), first)


def test_a_generator_gives_a_new_view_each_time():
    rng = rng_for(0, "views")
    assert not torch.equal(random_view(noise(), ALL, rng), random_view(noise(), ALL, rng))


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_with_everything_off_a_view_is_the_image(channels):
    pixels = noise(channels=channels)
    assert torch.allclose(view(pixels), to_input(pixels), atol=1e-6)


@pytest.mark.parametrize(
    "setting", [{"crop": (0.3, 0.9)}, {"rotate": 40}, {"translate": 0.3}, {"shear": 30}, {"jitter": 1.0}]
)
def test_each_image_of_a_batch_gets_its_own_view(setting):
    got = view(noise(1).expand(6, -1, -1, -1), **setting)
    assert all(not torch.allclose(got[i], got[j], atol=1e-3) for i in range(6) for j in range(i))


def test_a_flip_alone_mirrors_the_image(midway):
    midway()  # no change of aspect
    assert torch.allclose(view(noise(), flip=1.0), to_input(noise().flip(-1)), atol=1e-4)


@pytest.mark.parametrize("setting", [{"flip": 1.0}, {"rotate": 1e-6}, {"translate": 1e-7}])
def test_without_a_crop_the_whole_image_is_kept(setting):
    pixels = noise()
    whole = to_input(pixels.flip(-1) if "flip" in setting else pixels)
    assert torch.allclose(view(pixels, **setting), whole, atol=1e-3)


def test_half_of_the_images_are_mirrored(midway):
    midway()
    pixels = noise(1).expand(400, -1, -1, -1)
    mirrored = (view(pixels, flip=0.5) - to_input(pixels.flip(-1))).abs().amax((1, 2, 3)) < 1e-3
    assert 150 < mirrored.sum() < 250


def test_a_right_angle_turns_the_image(midway):
    midway({(-90.0, 90.0): 90.0})
    assert torch.allclose(view(noise(), rotate=90.0), to_input(noise().rot90(1, (2, 3))), atol=1e-3)


def test_a_translation_shifts_by_a_fraction_of_the_side_and_fills_with_black(midway):
    midway({(-1, 1): 1.0})
    got, pixels = view(noise(), translate=0.25), to_input(noise())
    assert torch.allclose(got[:, :, :12, :12], pixels[:, :, 4:, 4:], atol=1e-3)
    assert (got[:, :, 12:] == -2).all()
    assert (got[:, :, :, 12:] == -2).all()


def test_a_shear_moves_rows_apart_and_keeps_them_level(midway):
    midway({(-45.0, 45.0): 45.0})
    stripes = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    stripes[:, :, 4] = 255
    got = in_unit_range(view(stripes, shear=45.0))
    assert got[0, 0, 4].max() == pytest.approx(1, abs=1e-3)
    assert got[0, 0, [3, 5]].max() == pytest.approx(0, abs=1e-3)
    assert got[0, 0, 4].sum() == pytest.approx(
        16 - 3.5, abs=1e-3
    )  # at 45 degrees a row 3.5 off the middle moves by 3.5
    assert got[0, 0, 4, :3].max() == pytest.approx(0, abs=1e-3)


def test_a_crop_enlarges_a_fraction_of_the_area(midway):
    midway()
    half = noise(side=32)[:, :, 8:24, 8:24]
    wanted = torch.nn.functional.interpolate(to_input(half), 32, mode="bilinear", align_corners=False)
    got = view(noise(side=32), crop=(0.25, 0.25))
    assert torch.allclose(got[:, :, 1:-1, 1:-1], wanted[:, :, 1:-1, 1:-1], atol=1e-3)


def test_a_crop_stays_within_the_image():
    white = torch.full((200, 1, 16, 16), 255, dtype=torch.uint8)
    inner = view(white, crop=(0.2, 1.0))[:, :, 1:-1, 1:-1]  # the outermost half pixel may mix with the black outside
    assert torch.allclose(inner, torch.tensor(2.0), atol=1e-3)


def luma(colour: np.ndarray) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def recolour(
    image: np.ndarray, bright: float, contrast: float, saturation: float, turn: float, grey: bool
) -> np.ndarray:
    """Recolour one image (3, h, w) in float64, pixel by pixel."""
    out = np.empty_like(image, dtype=np.float64)
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    for y, x in np.ndindex(image.shape[1:]):
        colour = image[:, y, x] * bright
        colour = luma(colour) + saturation * (colour - luma(colour))
        light, i, q = to_yiq @ colour
        angle = 2 * math.pi * turn
        turned = [light, math.cos(angle) * i - math.sin(angle) * q, math.sin(angle) * i + math.cos(angle) * q]
        out[:, y, x] = luma(colour) if grey else np.linalg.solve(to_yiq, turned)
    middle = np.mean([luma(out[:, y, x]) for y, x in np.ndindex(image.shape[1:])])
    return np.clip(middle + contrast * (out - middle), 0, 1)


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize(
    "spreads",
    [(0.3, 0, 0, 0), (0, 0.4, 0, 0), (0, 0, 0.5, 0), (0, 0, 0, 0.1), (0.3, 0.4, 0.5, 0.1), (0.8, 0.7, 1.0, 0.5)],
)
def test_colours_change_as_computed_pixel_by_pixel(drawn, spreads, grey):
    names = ("brightness", "contrast", "saturation", "hue")
    pixels = noise(4, side=6)
    got = in_unit_range(view(pixels, jitter=1.0, grayscale=float(grey), **dict(zip(names, spreads, strict=True))))
    unchanged = torch.ones(4)
    bright, contrast, saturation = (drawn[1 - s, 1 + s] if s else unchanged for s in spreads[:3])
    turn = drawn[-spreads[3], spreads[3]]
    for k, image in enumerate(pixels.double().div(255).numpy()):
        factors = (float(bright[k]), float(contrast[k]), float(saturation[k]), float(turn[k]))
        wanted = recolour(image, *factors, grey)
        assert got[k].numpy() == pytest.approx(wanted, abs=1e-5)


def test_grayscale_alone_gives_every_channel_the_luma():
    pixels = noise()
    got = in_unit_range(view(pixels, grayscale=1.0))
    wanted = (pixels.double() / 255 * torch.tensor([0.299, 0.587, 0.114], dtype=torch.double)[:, None, None]).sum(1)
    for channel in range(3):
        assert torch.allclose(got[:, channel].double(), wanted, atol=1e-6)


def test_one_channel_has_brightness_and_contrast(drawn):
    pixels = noise(channels=1)
    got = in_unit_range(view(pixels, jitter=1.0, brightness=0.3, contrast=0.4, saturation=0.5, hue=0.1))
    for k, image in enumerate(pixels.double() / 255):
        bright, contrast = (float(drawn[1 - s, 1 + s][k]) for s in (0.3, 0.4))
        wanted = (bright * (image.mean() + contrast * (image - image.mean()))).clamp(0, 1)
        assert torch.allclose(got[k].double(), wanted, atol=1e-5)


def test_one_channel_is_already_grey():
    pixels = noise(channels=1)
    assert torch.allclose(view(pixels, grayscale=1.0), to_input(pixels), atol=1e-5)


def test_jitter_changes_only_the_chosen_images():
    pixels = noise(1).expand(400, -1, -1, -1)
    changed = (view(pixels, jitter=0.3) - to_input(pixels)).abs().amax((1, 2, 3)) > 1e-3
    assert 80 < changed.sum() < 160


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_blur_keeps_a_constant_image_and_smooths_a_noisy_one(channels):
    plain = torch.full((3, channels, 64, 64), 77, dtype=torch.uint8)
    assert torch.allclose(view(plain, blur=1.0), to_input(plain), atol=1e-5)
    pixels = noise(12, channels, 64)
    before, after = to_input(pixels), view(pixels, blur=1.0)
    assert torch.allclose(after.mean((2, 3)), before.mean((2, 3)), atol=0.02)
    assert (after.std((2, 3)) < before.std((2, 3)) + 1e-6).all()
    assert (after.std((2, 3)) < 0.8 * before.std((2, 3))).any()


def test_blur_is_a_gaussian_with_the_drawn_sigma(midway):
    midway({(0.1, 2.0): 2.0})
    sigma = 2.0 * 64 / 224
    point = torch.zeros(1, 1, 64, 64, dtype=torch.uint8)
    point[..., 32, 32] = 255
    got = in_unit_range(view(point, blur=1.0))[0, 0].double()
    row = got[32, 29:36] / got[32, 32]
    assert row.tolist() == pytest.approx([math.exp(-(d**2) / (2 * sigma**2)) for d in range(-3, 4)], abs=1e-5)
    assert got.sum() == pytest.approx(1, abs=1e-4)
    assert torch.allclose(got[29:36, 29:36], got[29:36, 29:36].T, atol=1e-6)


def test_solarize_inverts_the_bright_half():
    pixels = noise()
    brightness = pixels.double() / 255
    wanted = torch.where(pixels >= 128, 1 - brightness, brightness)
    assert torch.allclose(in_unit_range(view(pixels, solarize=1.0)).double(), wanted, atol=1e-6)


def test_ten_crops_are_the_image_its_corners_and_their_mirror_images():
    pixels = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
    pixels[..., :6, :6] = 255  # only the crop of the corner above left has it
    crops = [crop.mean() for crop in ten_crop(to_input(pixels), ViewsConfig(crop=(0.2, 1.0), flip=0.0))]
    bright, dark = (float(to_input(torch.full((1, 1, 1, 1), value, dtype=torch.uint8))) for value in (255, 0))
    expected = [dark + (bright - dark) * share for share in ((6 / 32) ** 2, (6 / 26) ** 2, 0, 0, 0)]
    assert [float(crop) for crop in crops] == pytest.approx(expected, abs=0.01)


def test_crops_are_those_that_random_views_can_have():
    pixels = torch.randint(0, 256, (2, 3, 9, 9), dtype=torch.uint8, generator=rng_for(0))
    whole = to_input(pixels)
    assert [crop.tolist() for crop in ten_crop(whole, ViewsConfig(crop=(1.0, 1.0), flip=0.0))] == [whole.tolist()]
    mirrored = ten_crop(whole, ViewsConfig(crop=(1.0, 1.0), flip=0.5))
    assert [crop.tolist() for crop in mirrored] == [whole.tolist(), whole.flip(3).tolist()]
    assert len(ten_crop(whole, ViewsConfig(crop=(0.2, 1.0), flip=0.5))) == 10
    assert len(ten_crop(whole, ViewsConfig(function="operator:itemgetter"))) == 1

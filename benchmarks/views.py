"""Two random views of every image of a batch: images per second of `random_view` compared with two alternatives.

    pil     one image at a time with PIL, as in benchmarks/per_image.py: target 8 x
    kornia  a batch at a time with kornia's modules, with the faster of its two cropping modes: target 2 x

All start with the same uint8 images of 32 px in memory, make the same changes (crop, flip, colour jitter, grayscale)
and return two batches of network input, on one torch thread.

    python benchmarks/views.py
"""

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from measuring import Row, alternate, medians, publish, seconds
from per_image import pil_view
from PIL import Image
from torch import Tensor, nn

from hetero_ssfl.config import ViewsConfig
from hetero_ssfl.data import random_view
from hetero_ssfl.data.views import MEAN, STD
from hetero_ssfl.seeding import rng_for

BATCH, SIDE = 256, 32
CONFIG = ViewsConfig()
INSTALL = "pip install 'hetero-ssfl[bench]'"


def batched(pixels: Tensor) -> Callable[[], object]:
    rng = rng_for(0, "views")
    return lambda: [random_view(pixels, CONFIG, rng) for _ in range(2)]


def pil(pixels: Tensor) -> Callable[[], object]:
    images = [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).numpy()]
    return lambda: [torch.stack([pil_view(image, CONFIG) for image in images]) for _ in range(2)]


def kornia(cropping: str, pixels: Tensor) -> Callable[[], object]:
    modules = importlib.import_module("kornia.augmentation")
    change = nn.Sequential(
        modules.RandomResizedCrop((SIDE, SIDE), scale=CONFIG.crop, cropping_mode=cropping),
        modules.RandomHorizontalFlip(p=CONFIG.flip),
        modules.ColorJitter(CONFIG.brightness, CONFIG.contrast, CONFIG.saturation, CONFIG.hue, p=CONFIG.jitter),
        modules.RandomGrayscale(p=CONFIG.grayscale),
        modules.Normalize(MEAN, STD),
    )
    return lambda: [change(pixels.float().div_(255)) for _ in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Images per second of two-view augmentation.")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--quick", action="store_true", help="two repeats, without writing results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = {"random_view": batched, "pil": pil}
    if importlib.util.find_spec("kornia"):
        ways |= {f"kornia, {cropping}": partial(kornia, cropping) for cropping in ("slice", "resample")}
    else:
        print(f"kornia is not installed, so its row is left out. To install it: {INSTALL}")
    pixels = torch.randint(0, 256, (BATCH, 3, SIDE, SIDE), generator=rng_for(0, "pixels"), dtype=torch.uint8)
    works = {name: way(pixels) for name, way in ways.items()}
    for work in works.values():
        work()  # the first call allocates and compiles
    sides = {name: partial(images_per_second, work) for name, work in works.items()}
    rates = medians(alternate(sides, 2 if options.quick else options.repeats))
    publish("views", compare(rates), {"images_per_second": rates, "batch": BATCH, "side": SIDE}, not options.quick)


def images_per_second(work: Callable[[], object]) -> float:
    return BATCH / seconds(work)


def compare(rates: dict[str, float]) -> list[Row]:
    ours, rivals = rates["random_view"], [rate for name, rate in rates.items() if name.startswith("kornia")]
    what = f"two views of a batch of {BATCH}, {SIDE} px, one thread"
    rows = [Row(what, "PIL, image by image", ours / rates["pil"], 8)]
    if rivals:
        rows.append(Row(what, "kornia, batched", ours / max(rivals), 2))
    return rows


if __name__ == "__main__":
    main()

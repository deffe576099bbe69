"""Generated colour photographs of different sizes: a shape in a colour of its class on a shaded background."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"sky": (60, 120, 220), "leaf": (50, 160, 60), "brick": (180, 80, 50)}


def write_photographs(folder: Path, count: int, seed: int = 0, classes: bool = True, grey: bool = False) -> None:
    """Write JPEG files, with one folder per class if there are `classes`."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        name = list(COLOURS)[number % len(COLOURS)]
        place = folder / name if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(photograph(rng, COLOURS[name]))
        (picture.convert("L") if grey else picture).save(place / f"IMG_{seed}{number:04}.jpg", quality=90)


def photograph(rng: np.random.Generator, colour: tuple[int, int, int]) -> np.ndarray:
    height, width = (int(side) for side in rng.integers(40, 72, 2))
    first, last = rng.uniform(30, 220, 2)
    shade = np.linspace(first, last, height)[:, None, None]
    picture = np.broadcast_to(shade, (height, width, 3)) + rng.normal(0, 8, (height, width, 3))
    top, left = int(rng.integers(0, height // 2)), int(rng.integers(0, width // 2))
    picture[top : top + height // 2, left : left + width // 2] = colour + rng.normal(0, 20, 3)
    return picture.clip(0, 255).astype(np.uint8)

"""Small real images for the examples of the documentation: handwritten digits as PNG files in folders."""

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

DIGITS = load_digits()


def write_pictures(folder: Path, first: int, count: int, classes: bool = False, mode: str = "L") -> None:
    """Write digits from number `first` on, optionally with one folder per class."""
    for number in range(first, first + count):
        place = folder / str(DIGITS.target[number]) if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        pixels = (DIGITS.images[number] * 255 / 16).astype("uint8")
        Image.fromarray(pixels).resize((16, 16)).convert(mode).save(place / f"{number:04}.png")


def write_folders(root: Path) -> None:
    """Write the images that the documentation assumes."""
    for name, first, count in (
        ("hospital-a", 0, 60),
        ("hospital-b", 60, 60),
        ("shared", 120, 40),
        ("images", 160, 150),
    ):
        write_pictures(root / name, first, count)

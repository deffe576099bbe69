"""A small federation on disk: three nodes with their own images and encoders, and a RAD folder."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

ENCODERS = ("resnet8(width=4)", "mobilenet(width=8, depth=1)", "vit(width=16, depth=1, heads=2)")

FEDERATION = """
name = "rehearsal"
method = "hetero-ssfl"
rounds = 2
local_epochs = 1
[data]
side = 8
channels = 1
[rad]
source = "{rad}"
size = 24
[clients]
count = {count}
[ssl]
projector = [32, 16]
predictor = 32
[optim]
batch = 16
[alignment]
rad_batch = 16
[evaluation]
every = 0
epochs = 5
probes = ["linear"]
untrained = false
[engine]
round_timeout = 240
join_timeout = 60
"""


def write_federation(folder: Path, encoders: tuple[str, ...] = ENCODERS, images: int = 60) -> tuple[Path, list[Path]]:
    """Write federation.toml and one node.toml per node to `folder`."""
    digits = load_digits()
    pictures = (digits.images * 15.9).astype(np.uint8)
    write_images(folder / "rad", pictures[:40], None)
    nodes = []
    for k, encoder in enumerate(encoders):
        rows = slice(100 + k * images, 100 + (k + 1) * images)
        home = folder / f"node-{k}"
        write_images(home / "images", pictures[rows], digits.target[rows] % 3)
        nodes.append(write_node(home, f"node-{k}", encoder))
    federation = folder / "federation.toml"
    federation.write_text(FEDERATION.format(rad=folder / "rad", count=len(encoders)))
    return federation, nodes


def write_node(home: Path, name: str, encoder: str, more: str = "") -> Path:
    path = home / "node.toml"
    home.mkdir(parents=True, exist_ok=True)
    path.write_text(f'name = "{name}"\nencoder = "{encoder}"\n{more}\n[data]\nsource = "images"\n')
    return path


def write_images(folder: Path, pictures: np.ndarray, labels: np.ndarray | None) -> None:
    """Write a folder of PNG files, with one subfolder per class if there are labels."""
    for number, picture in enumerate(pictures):
        place = folder if labels is None else folder / f"class-{labels[number]}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place / f"{number:04d}.png")

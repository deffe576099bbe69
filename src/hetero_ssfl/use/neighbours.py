"""Write a page of nearest images by the encoders of one or more clients."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data.images import SourceImage
from ..errors import ConfigError
from ..learning.features import extract_features, nearest
from ..report.page import fill_template, write_page
from ..report.rad_features import thumbnail
from ..seeding import rng_for
from ..terminal import Console
from .embed import Embedded, OnBad, embed, open_images
from .models import ModelFolder

log = logging.getLogger(__name__)

RANDOM_QUERIES = 4
SIDE = 160  # maximum side of a picture in the page, in pixels


@dataclass(frozen=True)
class Search:
    models: Sequence[ModelFolder]
    source: str | None
    """None means the RAD of the run."""
    queries: Sequence[str]
    """Row numbers, paths in the source, or files. If empty, the seed determines random queries."""
    k: int
    seed: int
    on_bad_image: OnBad = "error"
    encoder: str | None = None

    def open(self) -> tuple[int, Iterator[SourceImage]]:
        model = self.models[0]  # all clients of a run have the same input shape
        if self.source is not None:
            return open_images(model, self.source, self.on_bad_image)
        if model.run is None:
            raise ConfigError(f"'{model.path}' is a model without its run, so it has no RAD. Name other --images.")
        if not model.takes_images:
            raise ConfigError(f"the RAD of '{model.run.path}' does not contain images, so there is nothing to show.")
        pixels = model.run.rad()[0]
        return len(pixels), (SourceImage(row, None, image) for row, image in enumerate(pixels))


@dataclass(frozen=True)
class Query:
    name: str
    place: int = -1
    """Its place among the embedded images."""
    pixels: Tensor | None = None
    """Of an image from a file, which has no place."""


def write_neighbours(search: Search, output: Path, console: Console) -> None:
    """Write the page. Encoders that cannot be built here are left out, with a warning, if there are others."""
    write_page(output, lambda: _render(search, console))


def _load(models: Sequence[ModelFolder], encoder: str | None) -> dict[str, nn.Module]:
    """Return the encoders that can be built, by client."""
    built: dict[str, nn.Module] = {}
    missing: dict[str, ConfigError] = {}
    for model in models:
        try:
            built[model.client] = model.load(encoder)
        except ConfigError as error:
            missing[model.client] = error
    if not built:
        raise next(iter(missing.values()))
    for client, reason in missing.items():
        log.warning("%s is left out: %s", client, reason)
    return built


def _render(search: Search, console: Console) -> str:
    count, images = search.open()
    built = _load(search.models, search.encoder)
    encoders = list(built.values())
    embedded = embed(encoders, images, count, console)
    count = len(embedded.rows)
    if count < 2:
        raise ConfigError("there is only one image, expected at least 2 to compare. Name more with --images.")
    queries = [_query(search, text, embedded) for text in search.queries]
    if not queries:
        order = torch.randperm(count, generator=rng_for(search.seed, "neighbour queries"))
        queries = [Query(_name(embedded, place), place) for place in sorted(order[:RANDOM_QUERIES].tolist())]
    pairs = list(zip(encoders, embedded.features, strict=True))
    answers = [[_nearest(query, encoder, features, search.k) for encoder, features in pairs] for query in queries]
    shown = {place for answer in answers for near in answer for place, _ in near}
    pictures = _pictures(search, embedded, shown | {query.place for query in queries if query.pixels is None})
    cards = {model.client: model.card for model in search.models}
    clients = [f"{client}, {cards[client]['encoder']}" for client in built]
    sections = [
        {
            "name": query.name,
            "picture": pictures[query.place] if query.pixels is None else thumbnail(query.pixels, SIDE),
            "clients": zip(clients, answer, strict=True),
        }
        for query, answer in zip(queries, answers, strict=True)
    ]
    among = f"{count:,} shared images (RAD)" if search.source is None else f"{count:,} images of {search.source}"
    intro = (
        f"The {search.k} nearest of {among} to each query, nearest first, by the cosine similarity of each encoder's "
        "features (1 means the same direction)."
    )
    values = {"made_by": "neighbours", "title": "Nearest images", "intro": intro, "queries": sections}
    names = {place: _name(embedded, place) for place in shown}
    return fill_template(
        "neighbours.html", Path(__file__).parent / "templates", **values, names=names, pictures=pictures
    )


def _nearest(query: Query, encoder: nn.Module, features: Tensor, k: int) -> list[tuple[int, float]]:
    """Return the places and similarities of the images that are nearest to a query."""
    place = query.place
    if query.pixels is not None:  # an image from a file is appended for this query only
        features, place = torch.cat([features, extract_features(encoder, query.pixels[None])]), len(features)
    places, similarities = nearest(features, torch.tensor([place]), k)
    return list(zip(places[0].tolist(), similarities[0].tolist(), strict=True))


def _query(search: Search, text: str, embedded: Embedded) -> Query:
    if text.isdecimal() and int(text) in embedded.rows:
        place = embedded.rows.index(int(text))
        return Query(_name(embedded, place), place)
    if text in embedded.paths:
        return Query(text, embedded.paths.index(text))
    file, _, number = text.rpartition("#") if "#" in text and not Path(text).is_file() else (text, "", "")
    if Path(file).is_file():
        name = f"{Path(file).name}#{number}" if number else None
        _, images = open_images(search.models[0], file)
        if found := next((image for image in images if name in (None, image.path)), None):
            return Query(text, pixels=found.pixels)
    numbers = f"{embedded.rows[0]} to {embedded.rows[-1]}"
    raise ConfigError(f"--query '{text}' is neither a file, nor the path of an image, nor a number from {numbers}.")


def _name(embedded: Embedded, place: int) -> str:
    return embedded.paths[place] or f"image {embedded.rows[place]}"


def _pictures(search: Search, embedded: Embedded, places: set[int]) -> dict[int, str]:
    """Return thumbnails of the images at some places. A second pass keeps only these images in memory."""
    wanted = {embedded.rows[place]: place for place in places}
    images = islice((image for image in search.open()[1] if image.row in wanted), len(wanted))
    return {wanted[image.row]: thumbnail(image.pixels, SIDE) for image in images}

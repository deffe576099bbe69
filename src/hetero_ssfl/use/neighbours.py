"""Write a page of nearest images by the encoders of one or more clients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.streams import SourceImage
from ..errors import ConfigError
from ..learning.features import extract_features, nearest
from ..report.page import fill_template, write_page
from ..report.rad_features import thumbnail
from ..seeding import rng_for
from ..terminal import Console
from .embed import Embedded, OnBad, embed, open_images
from .models import ModelFolder

RANDOM_QUERIES = 4
SIDE = 160  # maximum side of a picture in the page, in pixels


Answer = tuple[list[int], list[float]]  # positions among the embedded images, and similarities


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
            raise ConfigError(
                f"'{model.path}' is a model without its run, so there is no RAD. Name images to search with --images."
            )
        if not model.takes_images:
            raise ConfigError(f"the RAD of '{model.run.path}' does not contain images, so there is nothing to show.")
        pixels = model.run.rad()[0]
        return len(pixels), (SourceImage(row, None, image) for row, image in enumerate(pixels))


@dataclass(frozen=True)
class Query:
    name: str
    pixels: Tensor | None
    """Pixels of a query file; None for a query among the embedded images, which has a `place`."""
    place: int | None


def write_neighbours(search: Search, output: Path, console: Console) -> None:
    write_page(output, lambda: _render(search, console))


def _render(search: Search, console: Console) -> str:
    count, images = search.open()
    encoders = [model.load(search.encoder) for model in search.models]
    embedded = embed(encoders, images, count, console)
    if len(embedded.rows) < 2:
        raise ConfigError("there is only one image, expected at least 2 to compare. Name more with --images.")
    queries = _queries(search, embedded)
    pairs = list(zip(encoders, embedded.features, strict=True))
    answers = [[_answer(query, encoder, features, search.k) for encoder, features in pairs] for query in queries]
    shown = {place for answer in answers for places, _ in answer for place in places}
    shown |= {query.place for query in queries if query.place is not None}
    pictures = _pictures(search, {embedded.rows[place] for place in shown})

    def near(places: list[int], similarities: list[float]) -> list[dict[str, str]]:
        return [
            {"name": _name(embedded, place), "picture": pictures[embedded.rows[place]], "similarity": f"{value:.3f}"}
            for place, value in zip(places, similarities, strict=True)
        ]

    sections: list[dict[str, Any]] = []
    for query, answer in zip(queries, answers, strict=True):
        clients = [
            {"name": f"{model.client}, {model.card['encoder']}", "near": near(*one)}
            for model, one in zip(search.models, answer, strict=True)
        ]
        picture = pictures[embedded.rows[query.place or 0]] if query.pixels is None else thumbnail(query.pixels, SIDE)
        sections.append({"name": query.name, "picture": picture, "clients": clients})
    count = len(embedded.rows)
    among = f"{count:,} shared images (RAD)" if search.source is None else f"{count:,} images of {search.source}"
    intro = (
        f"The {search.k} nearest of {among} to each query, nearest first, by the cosine similarity of each encoder's "
        "features (1 means the same direction)."
    )
    values = {"made_by": "neighbours", "title": "Nearest images", "intro": intro, "queries": sections}
    return fill_template("neighbours.html", Path(__file__).parent / "templates", **values)


def _answer(query: Query, encoder: nn.Module, features: Tensor, k: int) -> Answer:
    place = query.place
    if query.pixels is not None:  # an image from a file is appended for this query only
        features, place = torch.cat([features, extract_features(encoder, query.pixels[None])]), len(features)
    places, similarities = nearest(features, torch.tensor([place]), k)
    return places[0].tolist(), similarities[0].tolist()


def _queries(search: Search, embedded: Embedded) -> list[Query]:
    if not search.queries:
        order = torch.randperm(len(embedded.rows), generator=rng_for(search.seed, "neighbour queries"))
        return [Query(_name(embedded, place), None, place) for place in sorted(order[:RANDOM_QUERIES].tolist())]
    return [_query(search, text, embedded) for text in search.queries]


def _query(search: Search, text: str, embedded: Embedded) -> Query:
    if text.isdecimal() and int(text) in embedded.rows:
        place = embedded.rows.index(int(text))
        return Query(_name(embedded, place), None, place)
    if text in embedded.paths:
        return Query(text, None, embedded.paths.index(text))
    if Path(text).is_file():
        _, images = open_images(search.models[0], text)
        return Query(text, next(images).pixels, None)
    raise ConfigError(
        f"there is no image '{text}', expected a file, the path of one of the images, or a number from "
        f"{embedded.rows[0]} to {embedded.rows[-1]}. Change --query."
    )


def _name(embedded: Embedded, place: int) -> str:
    return embedded.paths[place] or f"image {embedded.rows[place]}"


def _pictures(search: Search, rows: set[int]) -> dict[int, str]:
    """Return thumbnails of the given rows. A second pass keeps only these images in memory."""
    pictures = {}
    for image in search.open()[1]:
        if image.row in rows:
            pictures[image.row] = thumbnail(image.pixels, SIDE)
        if len(pictures) == len(rows):
            break
    return pictures

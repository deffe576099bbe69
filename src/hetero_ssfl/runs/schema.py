"""What the files of a run folder must say, as far as anything reads it.

A run folder may come from someone else, or from an older version, so that nothing about a file's content is certain.
Entries that are not listed here are passed on unchecked.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ..errors import DamagedError

SiteKind = Literal["simulated", "python", "nodes"]
"""Where a run's participants are: a split of one data set, objects of a user's program, or node settings files."""

Metrics = dict[str, float]


class _File(BaseModel):
    model_config = ConfigDict(strict=True)


class Environment(_File):
    format: int
    command: str | None = None
    packages: dict[str, str | None] = {}


class GivenSources(_File):
    clients: dict[str, dict[str, str | None] | None]
    rad_taken: int | None = None


class Facts(_File):
    site: SiteKind
    federation: str = ""
    rad_digest: str = ""
    classes: list[str] = []
    holdings: dict[str, list[int]] = {}
    skipped_images: int = 0
    nodes: list[str] = []
    given: dict[str, dict[str, Any]] = {}
    sources: GivenSources | None = None
    checksums: dict[str, str | None] = {}

    @property
    def elsewhere(self) -> bool:
        """Whether the participants are on other machines, and so are their models."""
        return self.site == "nodes" and not self.nodes


class Model(_File):
    encoder: str
    parameters: int


class Results(_File):
    clients: dict[str, Metrics]
    mean: Metrics
    untrained: dict[str, Metrics]
    floors: dict[str, dict[str, Metrics]] = {}
    sd_over_clients: Metrics = {}
    models: dict[str, Model] = {}
    absent: list[str] = []
    never_trained: list[str] = []
    shared: Metrics = Field({}, alias="global")


class Node(_File):
    encoder: str | None = None
    examples: int | None = None
    state: str = ""
    last_seen: float = 0.0
    last_round: int = 0
    done: float | None = None
    """The fraction of its round that a client of this machine has finished."""
    seconds: float | None = None
    """From the begin of its last round to its reply, as the server saw it."""


class Status(_File):
    phase: str = ""
    round: int = 0
    updated: float = 0.0
    nodes: dict[str, Node] = {}
    waiting_for: list[str] = []
    last_warning: str = ""
    warnings: list[str] = []
    began: float = 0.0


class StudyTable(_File):
    caption: str
    head: list[str]
    rows: list[list[str]]


class StudyPlot(_File):
    title: str
    values: dict[str, float]
    limit: float | None = None
    """What 95 % of random guesses stay below."""


class StudySection(_File):
    """What a study of a run adds to its report: tables, plots and notes. The key "section" of its JSON file."""

    title: str
    intro: str
    tables: list[StudyTable] = Field(min_length=1)
    plots: list[StudyPlot] = []
    notes: list[str] = []
    folded: dict[str, list[str]] = {}


class Mark(_File):
    bytes: int = Field(ge=0)
    sha256: str


class Commit(_File):
    """What `server.safetensors` says about its round."""

    round: int
    roster: list[str]
    examples: dict[str, int]
    shares: dict[str, str]
    trained: dict[str, int] = {}
    events: Mark


KINDS: dict[str, type[_File]] = {
    **dict.fromkeys(("server.safetensors", "server-before.safetensors"), Commit),
    "environment.json": Environment,
    "facts.json": Facts,
    "results.json": Results,
    "history.json": create_model(
        "History", __base__=_File, earlier=(list[dict[str, str | int]], ...), given=(str | None, None)
    ),
    "sources.json": create_model("Sources", __base__=_File, data=(dict[str, Any], ...)),
    "status.json": Status,
}
STUDY = create_model("Study", __base__=_File, section=(StudySection | None, None))
"""Any other file: a study of the run, which may add a section to its report."""


def check_content(content: dict[str, Any], path: Path, remedy: str) -> None:
    """Raise DamagedError with the first entry that is not as expected."""
    try:
        KINDS.get(path.name, STUDY).model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place, value = ".".join(map(str, first["loc"])), str(first["input"])[:40]
        expected = first["msg"].lower().removeprefix("input ").removeprefix("should be ")
        raise DamagedError(f"'{path}' has {place} = {value}, expected: {expected}. {remedy}") from None

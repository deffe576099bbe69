"""What a round gives the server, in the plain form and as a secure sum."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...methods import ServerState
from ...runs.events import Event


@dataclass(frozen=True)
class Outcome:
    state: ServerState
    events: list[Event]
    """One per selected client."""
    replies: int
    """Number of clients whose replies were used."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Means of the clients' figures."""

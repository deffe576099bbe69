"""A secure sum played in one process: every client's state, everything that the server receives, and who drops out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hetero_ssfl.privacy.sums.client import ClientState, advertise, confirm, mask, reveal, share
from hetero_ssfl.privacy.sums.keys import PublicKeys
from hetero_ssfl.privacy.sums.rules import Rules, Session
from hetero_ssfl.privacy.sums.server import MaskedSum
from hetero_ssfl.privacy.sums.vectors import Layout, Vector

SESSION = Session("f" * 32, 1, "a" * 32)
LAYOUT = Layout(3, 40, 32)


def seeded(seed: int) -> Any:
    """Return a repeatable source of random bytes, in the place of the system's."""
    return np.random.default_rng(seed).bytes


def vectors(count: int, seed: int = 0, layout: Layout = LAYOUT) -> dict[str, Vector]:
    """Return one vector of any integers for each client."""
    rng = np.random.default_rng(seed)
    word = np.uint32 if layout.word == 32 else np.uint64
    return {
        f"client-{k:03d}": Vector(
            rng.integers(0, 2**63, layout.figures, np.uint64),
            rng.integers(0, np.iinfo(word).max, layout.body, word),
        )
        for k in range(count)
    }


def plain_sum(summands: Sequence[Vector]) -> Vector:
    total = summands[0].layout.zeros()
    for vector in summands:
        total.add(vector)
    return total


@dataclass
class Play:
    """All clients and the server. `gone[phase]` are the clients from which nothing more arrives from that phase on."""

    inputs: Mapping[str, Vector]
    gone: Mapping[int, set[str]] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    seed: int = 0
    session: Session = SESSION
    states: dict[str, ClientState] = field(default_factory=dict)
    view: list[tuple[str, str, Any]] = field(default_factory=list)
    """Everything that the server receives: phase, sender, content."""

    def __post_init__(self) -> None:
        self.server = MaskedSum(self.session, self.rules)
        self.random = {name: seeded(self.seed * 1000 + k) for k, name in enumerate(self.inputs)}
        self.roster: list[PublicKeys] = []
        self.senders: list[str] = []

    def present(self, phase: int) -> list[str]:
        absent = set[str]().union(*(names for when, names in self.gone.items() if when <= phase))
        return [name for name in self.inputs if name not in absent]

    def keys(self) -> None:
        for name in self.present(1):
            self.states[name], keys = advertise(self.session, name, random=self.random[name])
            self.view.append(("keys", name, keys))
            self.server.add_keys(keys)
        self.roster = self.server.roster()

    def share(self) -> None:
        for name in self.present(2):
            self.states[name], committed, sealed = share(
                self.states[name], self.session, self.roster, self.rules, random=self.random[name]
            )
            self.view.append(("shares", name, (committed, sealed)))
            self.server.add_shares(name, committed, sealed)
        self.senders = self.server.senders()

    def mask(self) -> None:
        for name in self.present(3):
            if name in self.senders:
                self.states[name], masked = mask(
                    self.states[name], self.session, self.senders, self.rules, self.inputs[name]
                )
                self.view.append(("masked", name, masked.copy()))
                self.server.add_masked(name, masked, masked.layout)

    def confirm(self) -> None:
        dropped, survivors = self.server.dropped(), self.server.survivors
        for name in self.present(4):
            if name in survivors:
                self.states[name], tags = confirm(self.states[name], self.session, survivors, dropped, self.rules)
                self.view.append(("confirm", name, tags))
                self.server.add_tags(name, tags)

    def unmask(self) -> Vector:
        confirmed = self.server.confirmed()
        for name in self.present(5):
            if name in confirmed:
                tags, sealed = self.server.tags_for(name), self.server.sealed_for(name)
                shares = reveal(self.states.pop(name), self.session, tags, sealed, self.rules)
                self.view.append(("unmask", name, shares))
                self.server.add_revealed(name, shares)
        return self.server.total()

    def total(self) -> Vector:
        self.keys()
        self.share()
        self.mask()
        self.confirm()
        return self.unmask()

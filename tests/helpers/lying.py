"""A server that follows no rule and knows all that some colluding clients know, against real ClientApps.

It plays the phases of a secure sum one by one, and may tell each client something else. `solve` then computes what it
can from everything that it has.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

from hetero_ssfl.federation import wire
from hetero_ssfl.federation.client.memory import ClientCache
from hetero_ssfl.federation.participants.node import open_node
from hetero_ssfl.federation.participants.node_rad import find_rad
from hetero_ssfl.federation.participants.node_settings import read_node
from hetero_ssfl.federation.server.loop import Server
from hetero_ssfl.methods import Broadcast, method_for
from hetero_ssfl.privacy.sums.client import ClientState, holders_of
from hetero_ssfl.privacy.sums.keys import PublicKeys, agree, digest_of, mask_seed, tag_of, unseal
from hetero_ssfl.privacy.sums.rules import Rules, Session
from hetero_ssfl.privacy.sums.shamir import SHARE, combine
from hetero_ssfl.privacy.sums.vectors import Vector, mask_of, sign_of

from .rig import Rig

SECURE = ("privacy.secure=true", "alignment.form=sketch", "evaluation.probes=[]", "rad.size=20", "alignment.rank=4")
SMALL = "resnet8(width=4)"
SELF, MASKING = 0, 1  # the two secrets of a client

Lists = dict[str, tuple[Sequence[str], Sequence[str]]]
"""For each client, which survivors and which dropped ones it is told."""


class LyingServer:
    """`bad` are the clients that collude. `nodes` are its clients, each a real ClientApp."""

    def __init__(self, root: Path, count: int, bad: Collection[str] = (), *overrides: str) -> None:
        self.rig = Rig(root, *SECURE, *overrides, encoders=(SMALL,) * count)
        self.server = Server(self.rig.grid, self.rig.folder, self.rig.config, self.rig.listen)
        self.server.roster.gather(None)
        self.names, self.bad = sorted(self.server.roster.ids), set(bad)
        self.method: Any = self.server.method
        self.federation = self.server.roster.federation
        self.known: dict[str, ClientState] = {}
        self.begin("0" * 32)

    def begin(self, attempt: str, federation: str | None = None, threshold: float = 2 / 3) -> None:
        self.session, self.rules = Session(federation or self.federation, 0, attempt), Rules(threshold)
        self.config = self.server.roster.config_toml.replace(f"threshold = {2 / 3}", f"threshold = {threshold}")
        self.refusals: dict[str, str] = {}
        self.vectors: dict[str, Vector] = {}
        self.told: dict[str, Sequence[str]] = {}
        self.shares: dict[tuple[str, int], dict[str, bytes]] = {}
        """Shares that the server has: by the client whose secret it is and its kind, and by holder."""

    def ask(self, name: str, kind: str, content: RecordDict) -> RecordDict | None:
        """Send a message to a client. Note why it refuses."""
        reply = self.rig.grid.answer(Message(content, self.server.roster.ids[name], kind))
        assert reply is not None
        if not reply.has_error():
            return reply.content
        self.refusals[name] = str(reply.error.reason)
        return None

    def message(self) -> RecordDict:
        header = replace(self.server.roster.header(self.session.round), federation=self.session.federation)
        return wire.pack(fields={"config": self.config, "attempt": self.session.attempt}, header=header)

    # --- phases ---

    def agree_on_masks(self, names: Sequence[str]) -> None:
        """Play the first two phases, honestly."""
        self.roster: list[PublicKeys] = []
        for name in names:
            content = RecordDict({**self.message(), "rad": self.server.roster.rad_record})
            if (reply := self.ask(name, "query.keys", content)) is not None:
                self.roster += [replace(keys, name=name) for keys in wire.roster_of(reply)]
        self.keys, self.digest = {keys.name: keys for keys in self.roster}, digest_of(self.session, self.roster)
        self.sealed: dict[str, Mapping[str, bytes]] = {}
        for name in self.keys:
            if (reply := self.ask(name, "query.shares", wire.with_roster(self.message(), self.roster))) is not None:
                self.sealed[name] = wire.named_of(reply)

    def collect(self, senders: Mapping[str, Sequence[str]]) -> None:
        """Play the third phase. Each client is told its own list of senders."""
        for name, told in senders.items():
            content = wire.with_lists(self.message(), {"senders": sorted(told)})
            if (reply := self.ask(name, "train", content)) is not None:
                self.vectors[name], self.told[name] = wire.vector_of(reply, self.method.layout(), name), told

    def unmask(self, lists: Lists) -> None:
        """Play the last two phases. Each client gets its own lists, and the tags of all. Those of colluding clients
        confirm whatever it was told."""
        tags: dict[str, Mapping[str, bytes]] = {}
        for name, (survivors, dropped) in lists.items():
            content = wire.with_lists(self.message(), {"survivors": sorted(survivors), "dropped": sorted(dropped)})
            if (reply := self.ask(name, "query.confirm", content)) is not None:
                tags[name] = wire.named_of(reply)
        for name in tags:
            own = {sender: given[name] for sender, given in tags.items() if name in given}
            for liar in self.bad - {name}:
                told = sorted(self.told[name]), sorted(lists[name][0])
                own[liar] = tag_of(self.known[liar].peers[name][2], liar, *told)
            sealed = {sender: given[name] for sender, given in self.sealed.items() if name in given}
            content = wire.with_named(self.message(), sealed, confirmed=list(own), tags=list(own.values()))
            if (reply := self.ask(name, "query.unmask", content)) is not None:
                for owner, share in wire.named_of(reply).items():
                    kind = SELF if owner in lists[name][0] else MASKING
                    self.shares.setdefault((owner, kind), {})[name] = share

    # --- what it knows ---

    def collude(self) -> None:
        """Open what was sealed for colluding clients, with their secrets. Call it before they forget them."""
        self.known = {name: self.state_of(name) for name in self.bad if name in self.keys}
        for name, state in self.known.items():
            for owner in self.keys.keys() - self.bad:
                both = unseal(state.peers[owner][0], self.sealed[owner][name], owner)
                self.shares.setdefault((owner, SELF), {})[name] = both[:SHARE]
                self.shares.setdefault((owner, MASKING), {})[name] = both[SHARE:]

    def state_of(self, name: str) -> ClientState:
        record: Mapping[str, Any] = self.rig.grid.states[self.server.roster.ids[name]].config_records["secure-sum"]
        return ClientState.from_json(str(record["state"]))

    def secret(self, owner: str, kind: int) -> bytes | None:
        points, shares = holders_of(owner, self.keys.keys() - {owner}), self.shares.get((owner, kind), {})
        needed = self.rules.shares_needed(len(points))
        chosen = sorted(shares)[:needed]
        return combine({points[holder]: shares[holder] for holder in chosen}) if len(chosen) == needed else None

    def solve(self, targets: Collection[str]) -> Vector | None:
        """Return the sum of the vectors of some honest clients, if the server can compute it."""
        total = self.method.layout().zeros()
        for name in sorted(targets):
            seed = self.secret(name, SELF)
            if seed is None or name not in self.vectors:
                return None
            total.add(self.vectors[name])
            total.add(mask_of(seed, total.layout), -1)
            for peer in sorted(set(self.told[name]) - {name}):
                if peer in targets and name in self.told[peer]:
                    continue  # both have the common mask
                if peer in self.bad:
                    common = self.known[peer].peers[name][1]
                else:
                    one, other = (peer, name) if self.secret(peer, MASKING) else (name, peer)
                    secret = self.secret(one, MASKING)
                    if secret is None:
                        return None
                    common = mask_seed(agree(secret, self.keys[other].masking, other), self.digest, one, other)
                total.add(mask_of(common, total.layout), -sign_of(name, peer))
        return total

    def honest(self, names: Collection[str]) -> Vector:
        """Return the sum of the vectors that these clients would send to a server that they trust."""
        total = self.method.layout().zeros()
        for name in names:
            node = read_node(self.rig.root / name / "node.toml")
            rad = find_rad(node, self.server.roster.rad_digest)
            assert rad is not None
            participant = open_node(node, self.rig.config, self.federation, rad)
            client = ClientCache().get(participant, 0)
            update = method_for(participant.config).local_update(client, Broadcast(0))
            total.add(self.method.summand(update, len(self.keys)))
        return total


def equal(one: Vector | None, other: Vector) -> bool:
    return one is not None and np.array_equal(one.body, other.body) and np.array_equal(one.figures, other.figures)

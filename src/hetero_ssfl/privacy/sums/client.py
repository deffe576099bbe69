"""A client's side of a secure sum.

Each phase is one function. It checks what the server sent, and returns the reply and the state for the next phase.

The server is not trusted. A message that would help it to learn a single summand raises ProtocolError.
"""

import hmac
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ...errors import ProtocolError
from .keys import (
    KEY,
    PublicKeys,
    Sign,
    Verify,
    agree,
    commitment,
    confirm_key,
    digest_of,
    fingerprint,
    mask_seed,
    public_key,
    seal,
    seal_key,
    tag_of,
    unseal,
)
from .rules import Rules, Session, neighbours
from .shamir import SHARE, Random, split
from .vectors import Vector, mask_of, sign_of

Phase = Literal["keys", "shares", "masked", "confirmed"]


@dataclass(frozen=True)
class ClientState:
    """What a client keeps between two phases. It is secret, and is deleted when the client reveals its shares."""

    session: Session
    name: str
    phase: Phase
    """The last phase that is done."""
    sealing: bytes = b""
    masking: bytes = b""
    """The secret keys, until the keys below have been derived from them."""
    self_seed: bytes = b""
    own_share: bytes = b""
    participants: tuple[str, ...] = ()
    peers: Mapping[str, tuple[bytes, bytes, bytes]] = field(default_factory=dict)
    """For each neighbour, the key of the share that it seals for us, the seed of the common mask, and the key with
    which we confirm lists to each other."""
    senders: tuple[str, ...] = ()
    """The participants that shared their secrets, and so may send a summand."""
    survivors: tuple[str, ...] = ()
    """The senders whose vectors are in the sum."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=bytes.hex)

    @classmethod
    def from_json(cls, text: str) -> "ClientState":
        values: dict[str, Any] = json.loads(text)
        for name in ("sealing", "masking", "self_seed", "own_share"):
            values[name] = bytes.fromhex(values[name])
        values["session"] = Session(**values["session"])
        values["peers"] = {peer: tuple(map(bytes.fromhex, keys)) for peer, keys in values["peers"].items()}
        lists = {name: tuple(values[name]) for name in ("participants", "senders", "survivors")}
        return cls(**{**values, **lists})

    def after(self, session: Session, phase: Phase) -> None:
        """Raise ProtocolError unless this is the phase that follows `phase` in the same session."""
        if session != self.session or self.phase != phase:
            own, other = f"round {self.session.round}, '{self.phase}'", f"round {session.round}, '{phase}'"
            raise ProtocolError(f"{self.name} is after {own}, the server after {other}. Keys are used once.")


# --- phase 1 ---


def advertise(
    session: Session, name: str, sign: Sign | None = None, random: Random = secrets.token_bytes
) -> tuple[ClientState, PublicKeys]:
    """Make the keys of one sum, signed with the participant's long-term key if it has one."""
    state = ClientState(session, name, "keys", random(KEY), random(KEY))
    keys = PublicKeys(name, public_key(state.sealing), public_key(state.masking))
    return state, replace(keys, signature=sign(keys.signed_part(session)) if sign else b"")


# --- phase 2 ---


def share(
    state: ClientState,
    session: Session,
    roster: Sequence[PublicKeys],
    rules: Rules,
    verify: Verify | None = None,
    seen: Collection[str] = (),
    random: Random = secrets.token_bytes,
) -> tuple[ClientState, bytes, dict[str, bytes]]:
    """Split the secrets of both kinds of masks. Return the state, a commitment to the self mask, and the sealed shares.

    `seen` are fingerprints of keys from earlier sums.
    """
    state.after(session, "keys")
    check_roster(state, roster, rules, verify, seen)
    digest = digest_of(session, roster)
    near = neighbours([keys.name for keys in roster], digest, rules)[state.name]
    holders = holders_of(state.name, near)
    needed, self_seed = rules.shares_needed(len(holders)), random(KEY)
    of_self = split(self_seed, needed, list(holders.values()), random)
    of_masking = split(state.masking, needed, list(holders.values()), random)
    both = {name: of_self[x] + of_masking[x] for name, x in holders.items()}
    peers, sealed = {}, {}
    for keys in roster:
        if keys.name in near:
            sealing = agree(state.sealing, keys.sealing, keys.name)
            masking = agree(state.masking, keys.masking, keys.name)
            sealed[keys.name] = seal(seal_key(sealing, digest, state.name, keys.name), both[keys.name])
            opening = seal_key(sealing, digest, keys.name, state.name)
            confirming = confirm_key(sealing, digest, state.name, keys.name)
            peers[keys.name] = (opening, mask_seed(masking, digest, state.name, keys.name), confirming)
    names = tuple(sorted(keys.name for keys in roster))
    after = ClientState(
        session, state.name, "shares", self_seed=self_seed, own_share=both[state.name], participants=names, peers=peers
    )
    return after, commitment(self_seed), sealed


def holders_of(name: str, near: Collection[str]) -> dict[str, int]:
    """Return who holds shares of a participant's secrets, with the point of each share."""
    return {holder: x for x, holder in enumerate(sorted({name, *near}), 1)}


def check_roster(
    state: ClientState, roster: Sequence[PublicKeys], rules: Rules, verify: Verify | None, seen: Collection[str]
) -> None:
    """Raise ProtocolError for a roster that would let the server know some masks."""
    own = [keys for keys in roster if keys.name == state.name]
    if len(roster) < rules.fewest:
        raise ProtocolError(
            f"the server asks for a sum of {len(roster)} participants, expected at least {rules.fewest}."
        )
    if [(keys.sealing, keys.masking) for keys in own] != [(public_key(state.sealing), public_key(state.masking))]:
        raise ProtocolError(f"the server's list of participants does not have {state.name} with the keys that it sent.")
    points = [key for keys in roster for key in (keys.sealing, keys.masking)]
    if len({keys.name for keys in roster}) < len(roster) or len(set(points)) < len(points):
        raise ProtocolError("the server lists a participant or a key twice, expected different ones.")
    known = set(seen)
    for keys in roster:
        if fingerprint(keys) in known:
            raise ProtocolError(f"the server repeats keys of {keys.name} from an earlier sum, expected new ones.")
        if verify and not verify(keys.name, keys.signed_part(state.session), keys.signature):
            raise ProtocolError(f"the keys of {keys.name} are not signed with its registered key.")


# --- phase 3 ---


def mask(
    state: ClientState, session: Session, senders: Sequence[str], rules: Rules, vector: Vector
) -> tuple[ClientState, Vector]:
    """Return the vector with all masks. `senders` are the participants whose shares the server received."""
    state.after(session, "shares")
    check_senders(state, senders, rules)
    masked = vector.copy()
    masked.add(mask_of(state.self_seed, vector.layout))
    for peer, (_, seed, _) in state.peers.items():
        if peer in senders:
            masked.add(mask_of(seed, vector.layout), sign_of(state.name, peer))
    return replace(state, phase="masked", senders=tuple(sorted(senders))), masked


def check_senders(state: ClientState, senders: Sequence[str], rules: Rules) -> None:
    """Raise ProtocolError if so few participants remain that the masks of this client would protect it less."""
    near = [name for name in senders if name in state.peers]
    needed = rules.survivors_needed(len(state.participants)), rules.shares_needed(len(state.peers) + 1)
    if state.name not in senders or len(set(senders)) < len(senders) or not set(senders) <= set(state.participants):
        raise ProtocolError(f"the server's list of senders is not a part of the list that {state.name} knows.")
    if len(senders) < needed[0] or len(near) + 1 < needed[1]:
        raise ProtocolError(
            f"only {len(senders)} of {len(state.participants)} participants shared their secrets, and {len(near)} of "
            f"the {len(state.peers)} neighbours of {state.name}; expected {needed[0]} and {needed[1] - 1}."
        )


# --- phase 4 ---


def confirm(
    state: ClientState, session: Session, survivors: Sequence[str], dropped: Sequence[str], rules: Rules
) -> tuple[ClientState, dict[str, bytes]]:
    """Return a tag for each surviving neighbour, which tells it what lists the server told this client."""
    state.after(session, "masked")
    both = sorted(set(survivors) & set(dropped))
    if both:
        raise ProtocolError(f"the server asks {state.name} for both shares of {both[0]}, to reveal its vector.")
    if sorted([*survivors, *dropped]) != list(state.senders) or state.name not in survivors:
        raise ProtocolError(f"the server's survivors and dropped ones are not those of the sum of {state.name}.")
    needed, all_of = rules.survivors_needed(len(state.participants)), len(state.participants)
    if len(survivors) < needed:
        raise ProtocolError(f"only {len(survivors)} of {all_of} participants survived, expected at least {needed}.")
    after = replace(state, phase="confirmed", survivors=tuple(sorted(survivors)))
    near = [name for name in after.survivors if name in state.peers]
    return after, {name: tag_of(state.peers[name][2], state.name, after.senders, after.survivors) for name in near}


# --- phase 5 ---


def reveal(
    state: ClientState, session: Session, tags: Mapping[str, bytes], sealed: Mapping[str, bytes], rules: Rules
) -> dict[str, bytes]:
    """Return one share for each neighbour and for this client: of its self mask if it survived, else of its key.

    `tags` are those of the neighbours that confirmed. The caller must delete the state before it sends the shares.
    """
    state.after(session, "confirmed")
    check_tags(state, tags, rules)
    alive, shares = set(state.survivors), {}
    for name in state.senders:
        if name == state.name:
            shares[name] = state.own_share[:SHARE]
        elif name in state.peers:
            content = unseal(state.peers[name][0], sealed.get(name, b""), name)
            shares[name] = content[:SHARE] if name in alive else content[SHARE:]
    return shares


def check_tags(state: ClientState, tags: Mapping[str, bytes], rules: Rules) -> None:
    """Raise ProtocolError unless enough neighbours were told the same lists: then no others can be unmasked.

    Two lists that t participants each confirm need an honest one that confirms both, as 2t > n + colluding ones.
    """
    near = [name for name in state.survivors if name in state.peers]
    keys = {name: state.peers[name][2] for name in near}
    expected = {name: tag_of(key, name, state.senders, state.survivors) for name, key in keys.items()}
    agreeing = [name for name in near if hmac.compare_digest(expected[name], tags.get(name, b""))]
    needed = rules.shares_needed(len(state.peers) + 1) - 1
    if len(agreeing) < needed:
        told = (
            f"{len(agreeing)} of the {len(state.peers)} neighbours of {state.name} confirmed its lists of participants"
        )
        raise ProtocolError(f"{told}, expected at least {needed}: the server may have told others different lists.")

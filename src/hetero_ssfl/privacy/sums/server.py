"""The server's side of a secure sum: it collects what the clients send in each phase, and computes the sum.

Masked vectors are added to a running sum as they arrive. No summand is kept.
"""

from collections.abc import Callable, Mapping

from ...errors import ProtocolError
from .client import holders_of
from .keys import KEY, TAG, PublicKeys, agree, commitment, digest_of, mask_seed, public_key
from .rules import Rules, Session, SumFailedError, neighbours
from .shamir import SHARE, combine
from .vectors import Layout, Vector, mask_of, sign_of

MAX_SIGNATURE = 512
PROBE = bytes(range(KEY))  # any secret, to try a public key with
SEALED = 2 * SHARE + 16  # bytes: two shares and a tag


class MaskedSum:
    """One attempt. The methods of a phase may only be called in the order of the phases."""

    def __init__(self, session: Session, rules: Rules) -> None:
        self.session, self.rules = session, rules
        self.keys: dict[str, PublicKeys] = {}
        self.near: dict[str, frozenset[str]] = {}
        self.commitments: dict[str, bytes] = {}
        self.sealed: dict[str, Mapping[str, bytes]] = {}
        """Sealed shares by sender and receiver."""
        self.survivors: list[str] = []
        self.tags: dict[str, Mapping[str, bytes]] = {}
        """By which survivors confirm the lists of participants, by sender and receiver."""
        self.revealed: dict[str, dict[str, bytes]] = {}
        """Shares by the participant whose secret they belong to, and by holder."""
        self._sum: Vector | None = None
        self._digest = b""
        self._points: set[bytes] = set()

    # --- phase 1 ---

    def add_keys(self, keys: PublicKeys) -> None:
        """Add a participant, unless its keys would make the others refuse the sum."""
        own = (keys.sealing, keys.masking)
        if any(len(key) != KEY for key in own) or len(keys.signature) > MAX_SIGNATURE:
            raise ProtocolError(f"{keys.name} sent keys of {len(keys.sealing)} and {len(keys.masking)} bytes.")
        if len(set(own)) < 2 or self._points & set(own):
            raise ProtocolError(f"{keys.name} sent a key that is also another one, expected new keys.")
        for key in own:
            agree(PROBE, key, keys.name)  # raises for a point of small order
        self.keys[keys.name] = keys
        self._points |= set(own)

    def roster(self) -> list[PublicKeys]:
        """End the phase. Return the participants and their keys."""
        self._need(len(self.keys), self.rules.fewest, "sent keys")
        roster = [self.keys[name] for name in sorted(self.keys)]
        self._digest = digest_of(self.session, roster)
        self.near = neighbours([keys.name for keys in roster], self._digest, self.rules)
        return roster

    # --- phase 2 ---

    def add_shares(self, sender: str, committed: bytes, sealed: Mapping[str, bytes]) -> None:
        if len(committed) != 32 or sealed.keys() != self.near[sender] or any(len(s) != SEALED for s in sealed.values()):
            raise ProtocolError(f"{sender} sent shares, expected one for each of its {len(self.near[sender])} peers.")
        self.commitments[sender], self.sealed[sender] = committed, sealed

    def senders(self) -> list[str]:
        """End the phase. Return the participants that may send a summand."""
        self._need(len(self.sealed), self._min_survivors(), "shared their secrets")
        return sorted(self.sealed)

    # --- phase 3 ---

    def add_masked(self, sender: str, vector: Vector, layout: Layout) -> None:
        """Add a masked vector to the sum."""
        if vector.layout != layout:
            raise ProtocolError(f"{sender} sent a vector of layout {vector.layout}, expected {layout}.")
        if self._sum is None:
            self._sum = layout.zeros()
        self._sum.add(vector)
        self.survivors.append(sender)

    def dropped(self) -> list[str]:
        """End the phase. Return the participants that shared their secrets but sent no vector."""
        self._need(len(self.survivors), self._min_survivors(), "sent their vectors")
        self.survivors.sort()
        return sorted(self.sealed.keys() - set(self.survivors))

    def sealed_for(self, receiver: str) -> dict[str, bytes]:
        """Return the shares that others sealed for a survivor."""
        return {sender: sealed[receiver] for sender, sealed in self.sealed.items() if receiver in sealed}

    # --- phase 4 ---

    def add_tags(self, sender: str, tags: Mapping[str, bytes]) -> None:
        if tags.keys() != self.near[sender] & set(self.survivors) or any(len(tag) != TAG for tag in tags.values()):
            raise ProtocolError(f"{sender} confirmed other participants than those that survived.")
        self.tags[sender] = tags

    def confirmed(self) -> list[str]:
        """End the phase. Return the participants that may be asked for shares."""
        self._need(len(self.tags), self._min_survivors(), "confirmed the lists of participants")
        return sorted(self.tags)

    def tags_for(self, receiver: str) -> dict[str, bytes]:
        return {sender: tags[receiver] for sender, tags in self.tags.items() if receiver in tags}

    # --- phase 5 ---

    def add_revealed(self, holder: str, shares: Mapping[str, bytes]) -> None:
        expected = {name for name in self.sealed if name == holder or holder in self.near[name]}
        if shares.keys() != expected or any(len(share) != SHARE for share in shares.values()):
            raise ProtocolError(f"{holder} revealed shares of other participants than it was asked for.")
        for name, share in shares.items():
            self.revealed.setdefault(name, {})[holder] = share

    def total(self) -> Vector:
        """Remove the masks and return the sum over the survivors."""
        assert self._sum is not None
        # All secrets first: without one of them, nothing may be unmasked.
        dropped = self.dropped()
        seeds = {name: self._secret(name, commitment, self.commitments[name]) for name in self.survivors}
        keys = {name: self._secret(name, public_key, self.keys[name].masking) for name in dropped}
        total, layout, alive = self._sum, self._sum.layout, set(self.survivors)
        for seed in seeds.values():
            total.add(mask_of(seed, layout), -1)
        for name, secret in keys.items():
            for peer in sorted(self.near[name] & alive):
                agreed = agree(secret, self.keys[peer].masking, peer)
                seed = mask_seed(agreed, self._digest, name, peer)
                total.add(mask_of(seed, layout), -sign_of(peer, name))
        self._sum = None
        return total

    def _secret(self, name: str, public_part: Callable[[bytes], bytes], expected: bytes) -> bytes:
        """Reconstruct a secret of a participant, and compare its public part with what the participant sent."""
        points, shares = holders_of(name, self.near[name]), self.revealed.get(name, {})
        needed = self.rules.shares_needed(len(points))
        self._need(len(shares), needed, f"revealed shares of {name}")
        chosen = sorted(shares)[:needed]  # the same for most secrets, whose coefficients are then known
        secret = combine({points[holder]: shares[holder] for holder in chosen})
        if secret is None or public_part(secret) != expected:
            who = ", ".join(chosen[:10])
            raise SumFailedError(f"the shares of {name} do not fit together: it or one of {who} sent a wrong one.")
        return secret

    def _min_survivors(self) -> int:
        return self.rules.survivors_needed(len(self.keys))

    def _need(self, got: int, expected: int, what: str) -> None:
        if got < expected:
            raise SumFailedError(
                f"round {self.session.round} is given up: {got} participants {what}, expected at least {expected}; "
                "nothing was unmasked."
            )

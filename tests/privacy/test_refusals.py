"""A client refuses, in one sentence, whatever would let a server or others learn a single summand."""

from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from helpers.sums import SESSION, Play, vectors
from hetero_ssfl.errors import ProtocolError
from hetero_ssfl.privacy.sums.client import advertise, confirm, mask, reveal, share
from hetero_ssfl.privacy.sums.keys import PublicKeys, fingerprint
from hetero_ssfl.privacy.sums.rules import Rules, SumFailedError
from hetero_ssfl.privacy.sums.server import MaskedSum

ME = "client-001"
SMALL_ORDER = [  # u-coordinates of points of order 1, 2, 4 and 8 on Curve25519 and its twist
    bytes(32),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
]


def at(*phases: str, count: int = 5) -> Play:
    """Play until the given phases are done."""
    play = Play(vectors(count))
    for phase in phases:
        getattr(play, phase)()
    return play


def refused(play: Play, roster: list[PublicKeys], rules: Rules | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        share(play.states[ME], SESSION, roster, rules or Rules())
    return sentence(caught.value)


def sentence(error: ProtocolError) -> str:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def changed(roster: list[PublicKeys], name: str, **keys: Any) -> list[PublicKeys]:
    return [replace(entry, **keys) if entry.name == name else entry for entry in roster]


# --- a false roster ---


@pytest.mark.parametrize("point", SMALL_ORDER, ids=range(len(SMALL_ORDER)))
@pytest.mark.parametrize("kind", ["sealing", "masking"])
def test_a_point_of_small_order(point: bytes, kind: str) -> None:
    play = at("keys")
    assert "small order" in refused(play, changed(play.roster, "client-003", **{kind: point}))


def test_the_server_refuses_a_client_whose_keys_would_stop_the_sum() -> None:
    play = at("keys")
    first, second = play.roster[:2]
    for bad in (replace(first, masking=SMALL_ORDER[2]), second, replace(second, name="x"), replace(first, sealing=b"")):
        server = MaskedSum(SESSION, Rules())
        server.add_keys(second)
        with pytest.raises(ProtocolError, match=r"small order|another one|bytes"):
            server.add_keys(replace(bad, name="client-009"))
        assert list(server.keys) == [second.name]


def test_a_roster_without_the_client_or_with_other_keys_of_it() -> None:
    play = at("keys")
    other = advertise(SESSION, ME)[1]
    for roster in ([k for k in play.roster if k.name != ME], [other if k.name == ME else k for k in play.roster]):
        assert f"does not have {ME} with the keys that it sent" in refused(play, roster)


def test_a_participant_or_a_key_that_is_listed_twice() -> None:
    play = at("keys")
    twice = replace(play.roster[0], name="client-999")  # one participant that poses as two
    assert "twice" in refused(play, [*play.roster, twice])
    assert "twice" in refused(play, [*play.roster, play.roster[0]])


def test_too_few_participants() -> None:
    play = at("keys")
    assert "a sum of 2 participants, expected at least 3" in refused(play, play.roster[:2])
    assert "a sum of 5 participants, expected at least 8" in refused(play, play.roster, Rules(fewest=8))


def test_repeated_keys_of_an_earlier_round() -> None:
    """The server may have reconstructed them there."""
    old = Play(vectors(5), seed=7, session=replace(SESSION, round=0))
    old.keys()
    play = at("keys")
    mixed = [old.roster[3] if k.name == "client-003" else k for k in play.roster]
    with pytest.raises(ProtocolError, match="repeats keys of client-003 from an earlier sum"):
        share(play.states[ME], SESSION, mixed, Rules(), seen=[fingerprint(k) for k in old.roster])


def test_the_same_keys_are_not_shared_twice() -> None:
    play = at("keys")
    state, *_ = share(play.states[ME], SESSION, play.roster, Rules())
    with pytest.raises(ProtocolError, match=r"Keys are used once"):
        share(state, SESSION, play.roster[:4], Rules())
    with pytest.raises(ProtocolError, match=r"after round 1, 'keys', the server after round 2"):
        share(play.states[ME], replace(SESSION, round=2), play.roster, Rules())
    with pytest.raises(ProtocolError, match="Keys are used once"):
        share(play.states[ME], replace(SESSION, attempt="b" * 32), play.roster, Rules())


# --- signatures ---


class Registered:
    """Long-term keys of all participants."""

    def __init__(self, names: list[str]) -> None:
        self.keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}

    def sign(self, name: str) -> object:
        return lambda text: self.keys[name].sign(text, ec.ECDSA(hashes.SHA384()))

    def verify(self, name: str, text: bytes, signature: bytes) -> bool:
        try:
            self.keys[name].public_key().verify(signature, text, ec.ECDSA(hashes.SHA384()))
        except Exception:
            return False
        return True


def test_keys_that_the_server_made_up_or_took_from_another_round() -> None:
    names = [f"client-{k:03d}" for k in range(4)]
    registered = Registered(names)
    made = {name: advertise(SESSION, name, registered.sign(name)) for name in names}  # type: ignore[arg-type]
    roster, state = [made[name][1] for name in names], made[ME][0]
    share(state, SESSION, roster, Rules(), registered.verify)
    earlier = advertise(replace(SESSION, round=0), names[3], registered.sign(names[3]))[1]  # type: ignore[arg-type]
    swapped = replace(roster[3], signature=roster[0].signature)
    for false in (advertise(SESSION, names[3])[1], earlier, swapped, advertise(SESSION, "nobody")[1]):
        with pytest.raises(ProtocolError, match="not signed with its registered key") as caught:
            share(state, SESSION, [*roster[:3], false], Rules(), registered.verify)
        sentence(caught.value)


# --- masking and unmasking ---


def test_a_list_of_senders_that_weakens_the_masks() -> None:
    play = at("keys", "share")
    vector = play.inputs[ME]
    for senders, reason in (
        (play.senders[:3], "only 3 of 5 participants shared their secrets"),
        ([n for n in play.senders if n != ME], "is not a part of the list"),
        ([*play.senders[:4], "stranger"], "is not a part of the list"),
        ([*play.senders, ME], "is not a part of the list"),
    ):
        with pytest.raises(ProtocolError, match=reason) as caught:
            mask(play.states[ME], SESSION, senders, Rules(), vector)
        sentence(caught.value)


def test_a_vector_is_masked_once() -> None:
    """The difference of two vectors under the same masks would be known."""
    play = at("keys", "share", "mask")
    with pytest.raises(ProtocolError, match="Keys are used once"):
        mask(play.states[ME], SESSION, play.senders, Rules(), play.inputs[ME])


@pytest.mark.parametrize(
    ("survivors", "dropped", "reason"),
    [
        ([0, 1, 2, 3, 4], [3], "for both shares of client-003"),
        ([0, 1, 2], [3, 4], "only 3 of 5 participants survived, expected at least 4"),
        ([0, 1, 2, 3], [], "are not those of the sum"),
        ([0, 2, 3, 4], [1], "are not those of the sum"),
        ([0, 1, 2, 3, 4, 5], [], "are not those of the sum"),
    ],
)
def test_a_request_that_would_unmask_more_than_the_sum(survivors: list[int], dropped: list[int], reason: str) -> None:
    play = at("keys", "share", "mask")
    names = [f"client-{k:03d}" for k in range(6)]
    asked = [names[k] for k in survivors], [names[k] for k in dropped]
    with pytest.raises(ProtocolError, match=reason) as caught:
        confirm(play.states[ME], SESSION, *asked, Rules())
    sentence(caught.value)


def test_shares_that_were_swapped_or_changed() -> None:
    play = at("keys", "share", "mask", "confirm")
    honest, tags = play.server.sealed_for(ME), play.server.tags_for(ME)
    swapped = {**honest, "client-000": honest["client-002"]}
    spoilt = {**honest, "client-000": honest["client-000"][:-1] + b"x"}
    for sealed in (swapped, spoilt, {}, {"client-000": b""}):
        with pytest.raises(ProtocolError, match=r"the share from client-00. cannot be decrypted"):
            reveal(play.states[ME], SESSION, tags, sealed, Rules())


def test_nothing_is_unmasked_after_the_phase_before_it_failed() -> None:
    play = Play(vectors(5), {3: {"client-000", "client-001"}})
    play.keys()
    play.share()
    play.mask()
    with pytest.raises(SumFailedError, match="3 participants sent their vectors, expected at least 4"):
        play.confirm()
    assert play.server.revealed == {}

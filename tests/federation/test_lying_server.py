"""What a server that lies, with the help of some clients, can learn from real ClientApps: only sums of many.

Each test plays an attack that once worked. Without its defence the attacker gets a vector that the test compares with
that of the honest client.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.instructions import RAD, Owner, tiny
from helpers.lying import Lists, LyingServer, equal
from hetero_ssfl.errors import DamagedError
from hetero_ssfl.federation.participants.record import RecordFile
from hetero_ssfl.federation.wire import arrays_of
from hetero_ssfl.privacy.accountant import epsilon_of, noise_multiplier

OTHER = "f" * 32


def names(*numbers: int) -> list[str]:
    return [f"node-{k}" for k in numbers]


@pytest.fixture(scope="module")
def of_five(tmp_path_factory: pytest.TempPathFactory) -> LyingServer:
    return LyingServer(tmp_path_factory.mktemp("five"), 5, names(4))


@pytest.fixture
def five(of_five: LyingServer) -> Iterator[LyingServer]:
    settings = [of_five.rig.root / name / "node.toml" for name in of_five.names]
    before = [path.read_text() for path in settings]
    for record in of_five.rig.root.rglob("privacy-*.json"):
        record.unlink()
    of_five.begin("0" * 32)
    yield of_five
    for path, text in zip(settings, before, strict=True):
        path.write_text(text)


def play(server: LyingServer, present: list[str]) -> None:
    """Play a sum as the protocol says."""
    server.agree_on_masks(present)
    if len(server.sealed) == len(present):
        server.collude()
        server.collect(dict.fromkeys(present, present))
        server.unmask(dict.fromkeys(present, (present, [])))


def allow(server: LyingServer, limits: str) -> None:
    for name in server.names:
        with (server.rig.root / name / "node.toml").open("a") as file:
            file.write(f"[limits]\n{limits}\n")


def test_an_honest_sum_is_all_that_the_server_and_a_client_learn(five: LyingServer) -> None:
    play(five, five.names)
    assert five.refusals == {}
    honest = names(0, 1, 2, 3)
    assert equal(five.solve(honest), five.honest(honest))
    assert five.solve(names(0)) is None
    assert five.solve(names(0, 1, 2)) is None


@pytest.mark.parametrize(("threshold", "reason"), [(0.5, "privacy.threshold = 0.5"), (0.6, "its limit is 0.666667")])
def test_a_low_threshold_is_refused_before_keys_are_sent(five: LyingServer, threshold: float, reason: str) -> None:
    """At 0.5 three of five shares are enough: two honest clients and a colluding one tell one secret of the victim, the
    other two and the same one the other. Each pair and the colluding client confirm their own list."""
    victim, rest = names(0), names(1, 2, 3, 4)
    five.begin("1" * 32, threshold=threshold)
    five.agree_on_masks(five.names)
    if len(five.sealed) == 5:
        five.collude()
        five.collect(dict.fromkeys(five.names, five.names))
        five.unmask({n: (five.names, []) if n in names(0, 1, 4) else (rest, victim) for n in five.names})
        assert not equal(five.solve(victim), five.honest(victim)), "the victim's vector"
    assert five.refusals.keys() == set(five.names)
    assert all(reason in text for text in five.refusals.values())
    assert five.roster == []


def test_clients_that_are_told_different_lists_reveal_nothing(tmp_path: Path) -> None:
    """Two of seven collude, fewer than a third. The victim hears of `keyless` and the colluding ones only. Everyone
    else hears that each of `keyless` vanished, but for itself: so the server can remove all masks of the victim."""
    victim, keyless, others, bad = names(0), names(1, 2), names(3, 4), names(5, 6)
    server = LyingServer(tmp_path, 7, bad)
    server.agree_on_masks(server.names)
    server.collude()
    small = [*victim, *keyless, *bad]
    server.collect({name: small if name in victim else server.names for name in server.names})
    told: Lists = {name: (server.names, []) for name in bad}
    told |= {name: (small, []) for name in victim}
    told |= {name: ([*others, *victim, *bad], keyless) for name in others}
    told |= {name: ([name, *others, *victim, *bad], [k for k in keyless if k != name]) for name in keyless}
    server.unmask(told)
    assert not equal(server.solve(victim), server.honest(victim)), "the victim's vector"
    assert server.refusals.keys() == set(server.names)
    assert all("the server may have told others different lists" in text for text in server.refusals.values())


def test_a_new_federation_needs_the_word_of_the_owner(five: LyingServer) -> None:
    """Training is deterministic: the difference of two sums over different clients would be a single vector."""
    play(five, five.names)
    five.begin("2" * 32, federation=OTHER)
    play(five, names(0, 1, 2, 4))
    assert five.solve(names(0, 1, 2)) is None, "without node-3, whose vector is the difference"
    assert five.refusals.keys() == set(names(0, 1, 2, 4))
    named = f'["{five.federation}", "{OTHER}"]'
    assert all(f"set limits.federations = {named}" in text for text in five.refusals.values())
    allow(five, f"federations = {named}")
    five.begin("3" * 32, federation=OTHER)
    play(five, names(0, 1, 2, 4))
    assert equal(five.solve(names(0, 1, 2)), five.honest(names(0, 1, 2))), "what the owners named"


def test_a_revealed_round_is_remembered_whatever_the_federation_is_called(five: LyingServer) -> None:
    allow(five, 'federations = "any"')
    play(five, five.names)
    five.begin("4" * 32, federation=OTHER)
    play(five, five.names)
    assert five.refusals == {}, "the same participants"
    five.begin("5" * 32, federation="e" * 32)
    play(five, names(0, 1, 2, 4))
    assert five.solve(names(0, 1, 2)) is None
    assert all("revealed the sum of round 0 for other participants" in text for text in five.refusals.values())
    assert five.refusals.keys() == set(names(0, 1, 2, 4))


@pytest.mark.parametrize("allowed", ["first", "any"])
def test_a_new_federation_does_not_reset_a_budget(tmp_path: Path, allowed: str) -> None:
    """Thirty federations ask for one contribution each. A budget of four is spent after four."""
    noisy = ("privacy.epsilon=8", "alignment.form=sketch", "evaluation.probes=[]")
    cost = noise_multiplier(8.0, 1e-5, 4) ** -2  # three rounds and the opening
    limit = (epsilon_of(4 * cost, 1e-5) + epsilon_of(5 * cost, 1e-5)) / 2
    owner = Owner(tmp_path, f'epsilon = {limit}\nfederations = "{allowed}"')
    replies = [owner.ask("train", tiny(*noisy), RAD, round=0, federation=f"{k:032x}") for k in range(30)]
    answered = [reply for reply in replies if not reply.has_error()]
    assert len(answered) == (4 if allowed == "any" else 1)
    assert all("sketch" in arrays_of(reply.content) for reply in answered)
    record = json.loads((tmp_path / "state" / "privacy-clinic.json").read_text())
    assert (record["releases"], len(record["federations"])) == (len(answered), len(answered))
    reason = str(replies[-1].error.reason)
    assert ("has a privacy budget of epsilon" if allowed == "any" else "is new") in reason


def test_a_damaged_record_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """Not even after one flipped bit in the word `sha256`, which makes it look like a file without a digest."""
    file = RecordFile(tmp_path / "privacy-a.json", OTHER, "first")
    with file.change() as record:
        record.squared_mu, record.releases = 1.0, 1
    assert file.read().releases == 1
    whole = file.path.read_bytes()
    start = whole.index(b"sha256")
    for bit in range(8 * len(b"sha256")):
        spoilt = bytearray(whole)
        spoilt[start + bit // 8] ^= 1 << bit % 8
        file.path.write_bytes(spoilt)
        with pytest.raises(DamagedError):
            file.read()
    file.path.write_bytes(whole.replace(whole[start - 1 : start + 75], b'"x": 0'))
    with pytest.raises(DamagedError):
        file.read()

"""What the server and colluding participants can compute: the sum, and nothing else."""

from itertools import combinations

import numpy as np
import pytest

from helpers.sums import Play, vectors
from hetero_ssfl.privacy.sums.client import holders_of
from hetero_ssfl.privacy.sums.keys import public_key, unseal
from hetero_ssfl.privacy.sums.rules import Rules
from hetero_ssfl.privacy.sums.shamir import SHARE, combine
from hetero_ssfl.privacy.sums.vectors import Layout, Vector, mask_of, sign_of

LONG = Layout(4, 50_000)


def shifted(inputs: dict[str, Vector], by: np.ndarray) -> dict[str, Vector]:
    """Move something from one client's vector to another's. The sum stays the same."""
    first, second = list(inputs)[:2]
    moved = {name: vector.copy() for name, vector in inputs.items()}
    moved[first].body[:] += by
    moved[second].body[:] -= by
    return moved


def test_a_masked_reply_is_uniform_even_if_the_vector_is_not() -> None:
    inputs = {name: LONG.zeros() for name in vectors(4)}
    play = Play(inputs)
    play.total()
    for phase, _, content in play.view:
        if phase == "masked":
            counts = np.bincount(content.body.view(np.uint8), minlength=256)
            assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 350  # 255 degrees of freedom: 7e-5


def test_two_inputs_with_the_same_sum_give_the_same_view_but_for_the_masks() -> None:
    """With the same random numbers only the masked vectors differ, and by no more than a change of masks explains."""
    inputs = vectors(4, layout=LONG)
    by = np.random.default_rng(5).integers(0, 2**32, LONG.body, np.uint32)
    one, other = Play(inputs), Play(shifted(inputs, by))
    assert np.array_equal(one.total().body, other.total().body)
    first, second = list(inputs)[:2]
    for (phase, name, a), (_, _, b) in zip(one.view, other.view, strict=True):
        if phase != "masked":
            assert a == b
        else:
            change = {first: by, second: -by}.get(name, np.zeros_like(by))
            assert np.array_equal(b.body - a.body, change)
    # The common mask of the two, moved by the same amount, gives the first view again: no mask is known to the server.
    seeds = {name: content for phase, name, content in other.view if phase == "masked"}
    seeds[first].body[:] -= by * np.uint32(sign_of(first, second))
    seeds[second].body[:] += by * np.uint32(sign_of(first, second))
    before = {name: content for phase, name, content in one.view if phase == "masked"}
    assert all(np.array_equal(seeds[name].body, before[name].body) for name in inputs)


def secrets_known_to(play: Play, colluding: set[str]) -> dict[tuple[str, str], int]:
    """Return how many shares of each secret the server and some participants have: revealed ones, and those that the
    participants can decrypt."""
    found: dict[tuple[str, str], set[str]] = {}
    dropped = set(play.server.dropped())
    for owner, shares in play.server.revealed.items():
        kind = "masking" if owner in dropped else "self"
        found.setdefault((owner, kind), set()).update(shares)
    for owner in play.senders:
        for kind in ("self", "masking"):
            found.setdefault((owner, kind), set()).update(colluding & set(holders_of(owner, play.server.near[owner])))
    return {secret: len(holders) for secret, holders in found.items()}


def test_two_of_five_and_the_server_cannot_reconstruct_both_secrets_of_a_third() -> None:
    """The threshold is 4 of 5. Keys of survivors stay secret, and so do self masks of those that dropped out."""
    for bad in combinations(list(vectors(5)), 2):
        for late in [None, *(set(vectors(5)) - set(bad))]:
            play = Play(vectors(5), {3: {late} if late else set()})
            play.total()
            known = secrets_known_to(play, set(bad))
            for name in set(vectors(5)) - set(bad):
                kept = "self" if name == late else "masking"
                assert known[name, kept] == 2
            assert Rules().shares_needed(5) == 4


def test_a_server_that_tells_participants_different_things_gets_too_few_shares() -> None:
    """Split the honest ones as it likes: with two of five colluding, one of both secrets stays below the threshold."""
    honest, needed = 3, Rules().shares_needed(5)
    for told_survived in range(honest + 1):
        told_dropped = honest - told_survived
        assert min(told_survived, told_dropped) + 2 < needed


@pytest.mark.parametrize("count", range(3, 40))
def test_the_threshold_needs_a_third_of_the_participants_to_help_a_lying_server(count: int) -> None:
    colluding = -(-count // 3) - 1  # fewer than a third
    assert 2 * Rules().shares_needed(count) > count + colluding


def test_four_colluding_participants_of_five_can_do_it() -> None:
    """The check above can fail: from the threshold on, shares are enough."""
    play = Play(vectors(5))
    play.keys()
    play.share()
    play.mask()
    victim, bad = "client-000", [f"client-{k:03d}" for k in (1, 2, 3, 4)]
    points = holders_of(victim, play.server.near[victim])
    both = {name: unseal(play.states[name].peers[victim][0], play.server.sealed[victim][name], victim) for name in bad}
    self_seed = combine({points[n]: share[:SHARE] for n, share in both.items()})
    masking = combine({points[n]: share[SHARE:] for n, share in both.items()})
    assert self_seed is not None
    assert masking is not None
    assert self_seed == play.states[victim].self_seed
    assert public_key(masking) == play.server.keys[victim].masking
    assert combine({points[n]: both[n][:SHARE] for n in bad[:3]}) != self_seed
    assert mask_of(self_seed, LONG).body.any()

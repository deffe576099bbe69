"""A secure sum is the plain sum of those that took part, whoever drops out; or it is given up and nothing is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sums import LAYOUT, Play, plain_sum, seeded, vectors
from hetero_ssfl.privacy.sums.client import ClientState
from hetero_ssfl.privacy.sums.rules import Rules, SumFailedError, _tail, degree, neighbours
from hetero_ssfl.privacy.sums.shamir import PRIME, SHARE, combine, split
from hetero_ssfl.privacy.sums.vectors import Layout, Vector, decode, encode, fraction_bits, mask_of


def assert_equal(found: Vector, expected: Vector) -> None:
    assert np.array_equal(found.figures, expected.figures)
    assert np.array_equal(found.body, expected.body)


@given(count=st.integers(3, 9), data=st.data())
@settings(max_examples=80)
def test_the_sum_is_that_of_the_survivors_or_is_given_up(count: int, data: st.DataObject) -> None:
    """Any client may vanish before any phase."""
    inputs = vectors(count)
    leaves = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 9, 9, 9, 9]), min_size=count, max_size=count))
    gone = {phase: {n for n, when in zip(inputs, leaves, strict=True) if when == phase} for phase in (1, 2, 3, 4, 5)}
    play = Play(inputs, gone)
    known, sent = play.present(1), play.present(3)
    needed = max(3, 2 * len(known) // 3 + 1)
    if len(known) < 3 or len(sent) < needed or len(play.present(5)) < needed:
        with pytest.raises(SumFailedError, match=r"round 1 is given up: \d+ participants .*nothing was unmasked"):
            play.total()
    else:
        assert_equal(play.total(), plain_sum([inputs[name] for name in sent]))


@pytest.mark.parametrize("phase", [2, 3, 4, 5])
def test_one_of_five_may_vanish_before_any_phase(phase: int) -> None:
    inputs = vectors(5)
    play = Play(inputs, {phase: {"client-002"}})
    left = [v for n, v in inputs.items() if n != "client-002" or phase >= 4]
    assert_equal(play.total(), plain_sum(left))


def test_both_word_sizes_are_summed() -> None:
    inputs = vectors(4, layout=Layout(2, 9, 64))
    assert_equal(Play(inputs).total(), plain_sum(list(inputs.values())))


def test_beyond_thirty_participants_each_has_few_neighbours() -> None:
    gone = {2: {"client-007"}, 3: {"client-001", "client-055"}, 4: {"client-030"}}
    inputs = vectors(60, layout=Layout(1, 5))
    play = Play(inputs, gone)
    total = play.total()
    lost = gone[2] | gone[3]
    assert_equal(total, plain_sum([v for n, v in inputs.items() if n not in lost]))
    assert {len(near) for near in play.server.near.values()} == {54}


def test_a_client_that_sends_wrong_shares_is_found_out() -> None:
    play = Play(vectors(5))
    play.keys()
    play.share()
    play.mask()
    play.confirm()
    honest = play.server.add_revealed

    def lie(holder: str, shares: dict[str, bytes]) -> None:
        honest(holder, {n: bytes(SHARE) if holder == "client-001" else s for n, s in shares.items()})

    play.server.add_revealed = lie  # type: ignore[method-assign, assignment]
    with pytest.raises(SumFailedError, match=r"shares of client-000 do not fit together.*client-001"):
        play.unmask()


def test_states_survive_being_written_down() -> None:
    """A node handles each message in a new process."""
    play = Play(vectors(4))
    for step in (play.keys, play.share, play.mask, play.confirm):
        step()
        assert {n: ClientState.from_json(s.to_json()) for n, s in play.states.items()} == play.states
    play.unmask()


# --- parts ---


@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 4), st.randoms(use_true_random=False))
def test_shares_give_the_secret_from_the_threshold_on_and_nothing_below(secret, threshold, more, random) -> None:
    points = list(range(1, threshold + more + 1))
    shares = split(secret, threshold, points, seeded(1))
    chosen = random.sample(points, threshold)
    assert combine({x: shares[x] for x in chosen}) == secret
    if threshold > 1:  # for every other secret there is a polynomial through the remaining shares
        few = {x: int.from_bytes(shares[x], "big") for x in chosen[1:]}
        other = int.from_bytes(bytes(32), "big") ^ 12345
        assert interpolate({0: other, **few}, chosen[0]) in range(PRIME)
        assert combine({x: shares[x] for x in chosen[1:]}) != secret


def interpolate(values: dict[int, int], at: int) -> int:
    """Lagrange's formula, term by term."""
    total = 0
    for x, y in values.items():
        term = y
        for other in values:
            if other != x:
                term = term * (at - other) * pow(x - other, -1, PRIME) % PRIME
        total = (total + term) % PRIME
    return total


def test_the_field_is_prime() -> None:
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11))


@given(
    st.sampled_from([32, 64]),
    st.lists(st.lists(st.floats(-16, 16), min_size=3, max_size=3), min_size=1, max_size=40),
)
def test_fixed_point_sums_are_right_to_the_last_bit_that_fits(word: int, rows: list[list[float]]) -> None:
    count = len(rows)
    encoded = [encode(np.array(row), word, count, 16.0) for row in rows]
    total = encoded[0].copy()
    for other in encoded[1:]:
        total += other
    step = 2.0 ** -fraction_bits(word, count, 16.0)
    assert np.allclose(decode(total, count, 16.0), np.array(rows).sum(0), atol=step * count, rtol=1e-12)
    assert step <= 64 * count * 2.0 ** (1 - word)  # no more than two bits are given away


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 100, 1000])
def test_sums_of_the_largest_values_do_not_wrap_around(count: int) -> None:
    for value in (16.0, -16.0, 1e30):
        words = encode(np.array([value]), 32, count, 16.0)
        total = (words.astype(np.uint64) * count).astype(np.uint32)
        assert decode(total, count, 16.0)[0] == pytest.approx(np.clip(value, -16, 16) * count, rel=1e-5)


def test_masks_are_uniform_and_differ_between_seeds() -> None:
    layout = Layout(1000, 100_000)
    one, other = (mask_of(bytes([k]) * 32, layout) for k in (1, 2))
    counts = np.bincount(one.body.view(np.uint8), minlength=256)
    assert chi_square(counts) < 350  # 255 degrees of freedom: the probability is 7e-5
    assert (one.body == other.body).mean() < 1e-3
    assert not np.array_equal(one.figures.view(np.uint32), one.body[:2000])


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@given(st.integers(31, 300))
@settings(max_examples=10)
def test_neighbourhood_is_symmetric_and_as_large_as_stated(count: int) -> None:
    names = [f"n{k}" for k in range(count)]
    near = neighbours(names, b"digest", Rules())
    assert all(name in near[peer] for name in names for peer in near[name])
    assert {len(peers) for peers in near.values()} == {min(degree(count, Rules()), count - 1)}
    assert neighbours(names[::-1], b"digest", Rules()) == near
    if degree(count, Rules()) < count - 1:
        assert neighbours(names, b"another", Rules()) != near


def test_the_number_of_neighbours_grows_slowly() -> None:
    assert [degree(n, Rules()) for n in (100, 1000, 10_000)] == [54, 78, 96]


def test_tails_equal_counting() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.hypergeometric(6, 14, 8, 200_000)
    assert _tail(20, 6, 8, 4) == pytest.approx((drawn >= 4).mean(), abs=0.005)
    assert LAYOUT.zeros().layout == LAYOUT

"""Random numbers depend only on the seed and the named scope."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_ssfl.seeding import global_seed, rng_for, seed_for

SCOPES = st.lists(st.one_of(st.integers(0, 300), st.sampled_from(["client", "round", "views"])), max_size=4)


@given(st.integers(0, 2**40), SCOPES)
def test_a_seed_has_63_bits(seed, scope):
    assert 0 <= seed_for(seed, *scope) < 2**63


@given(st.integers(0, 9), SCOPES, st.integers(0, 9), SCOPES)
def test_different_scopes_have_different_seeds(seed, scope, other_seed, other_scope):
    same = (seed, scope) == (other_seed, other_scope)
    assert (seed_for(seed, *scope) == seed_for(other_seed, *other_scope)) == same


def test_adjacent_numbers_in_a_scope_are_separated():
    assert seed_for(0, "client", 1, 23) != seed_for(0, "client", 12, 3)
    assert seed_for(0, 1) != seed_for(1, 0)


def test_seeds_never_change_between_versions():
    text = "7\x1fclient\x1f3"
    assert seed_for(7, "client", 3) == int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) >> 1


def test_generators_of_one_scope_are_equal_but_independent():
    first, second = rng_for(1, "views"), rng_for(1, "views")
    drawn = torch.rand(5, generator=first)
    assert torch.equal(torch.rand(5, generator=second), drawn)
    assert not torch.equal(torch.rand(5, generator=first), drawn)
    assert not torch.equal(torch.rand(5, generator=rng_for(2, "views")), drawn)


def test_a_generator_does_not_change_the_global_generator():
    before = torch.get_rng_state()
    torch.rand(5, generator=rng_for(1, "views"))
    assert torch.equal(torch.get_rng_state(), before)


def test_global_seed_sets_and_restores_the_global_generator():
    before = torch.get_rng_state()
    with global_seed(1, "init"):
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(100)
    with global_seed(1, "init"):
        assert torch.equal(torch.rand(3), inside)
    with global_seed(1, "other"):
        assert not torch.equal(torch.rand(3), inside)


def test_global_seed_restores_the_generator_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), global_seed(1):
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)

"""Nobody is tested on what anybody trains on."""

import logging

import pytest
import torch

from hetero_ssfl.data import Images, without_trained
from hetero_ssfl.errors import DataError


def samples(*numbers: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Each of its own colour."""
    return torch.tensor(numbers, dtype=dtype).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)


def held_out(*numbers: int) -> Images:
    return Images(samples(*numbers), torch.tensor(numbers), tuple(map(str, range(10))))


def test_what_is_trained_on_is_left_out_with_its_label_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    parts = {"test samples of a": held_out(1, 2, 3), "test samples of b": held_out(8, 9)}
    kept = without_trained(parts, {"the training data of b": samples(5, 2, 2), "the RAD": samples(3)})
    first = kept["test samples of a"]
    assert torch.equal(first.pixels, samples(1))
    assert first.labels is not None
    assert first.labels.tolist() == [1]
    assert kept["test samples of b"] is parts["test samples of b"]
    said = "2 of 3 test samples of a also occur in the RAD and the training data of b and are left out"
    assert [record.message for record in caplog.records] == [said]


def test_nothing_is_said_where_nothing_is_shared(caplog: pytest.LogCaptureFixture) -> None:
    empty = held_out(1).subset(torch.arange(0))
    with caplog.at_level(logging.DEBUG):
        without_trained({"a": held_out(1, 2), "b": empty}, {"c": samples(3), "d": samples(1, dtype=torch.float32)})
    assert not caplog.records


def test_a_part_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(DataError, match="all 2 test samples of a also occur in d0 and d1, so they would measure no"):
        without_trained({"test samples of a": held_out(1, 2)}, {"d0": samples(2), "d1": samples(1)})
    many = {f"d{k}": samples(k) for k in range(5)}
    with pytest.raises(DataError, match="occur in d0 and d1 and 3 others"):
        without_trained({"test samples of a": held_out(*range(5))}, many)

"""Training samples are removed from the held-out data."""

import logging

import pytest
import torch

from hetero_ssfl.data import Images, without_trained
from hetero_ssfl.errors import DataError


def samples(*numbers: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return one sample per number, each of a different colour."""
    return torch.tensor(numbers, dtype=dtype).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)


def held_out(*numbers: int) -> Images:
    return Images(samples(*numbers), torch.tensor(numbers), tuple(map(str, range(10))))


def test_training_samples_are_removed_with_their_labels_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    parts = {"test samples of a": held_out(1, 2, 3), "test samples of b": held_out(8, 9)}
    kept = without_trained(parts, {"the training data of b": samples(5, 2, 2), "the RAD": samples(3)})
    first = kept["test samples of a"]
    assert torch.equal(first.pixels, samples(1))
    assert first.labels is not None
    assert first.labels.tolist() == [1]
    assert kept["test samples of b"] is parts["test samples of b"]
    said = "2 of 3 test samples of a also occur in the RAD and the training data of b and are left out"
    assert [record.message for record in caplog.records] == [said]


def test_there_is_no_warning_without_duplicates(caplog: pytest.LogCaptureFixture) -> None:
    empty = held_out(1).subset(torch.arange(0))
    with caplog.at_level(logging.DEBUG):
        without_trained({"a": held_out(1, 2), "b": empty}, {"c": samples(3), "d": samples(1, dtype=torch.float32)})
    assert not caplog.records


def test_a_part_that_would_be_empty_is_refused() -> None:
    with pytest.raises(DataError, match="all 2 test samples of a also occur in d0 and d1, so they would measure no"):
        without_trained({"test samples of a": held_out(1, 2)}, {"d0": samples(2), "d1": samples(1)})
    many = {f"d{k}": samples(k) for k in range(5)}
    with pytest.raises(DataError, match="occur in d0 and d1 and 3 others"):
        without_trained({"test samples of a": held_out(*range(5))}, many)

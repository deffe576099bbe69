"""How federate separates training, test and validation samples, and applies a limit."""

from collections.abc import Sequence

import pytest
import torch

from helpers.pieces import net
from hetero_ssfl import Client, load_config
from hetero_ssfl.api.federated import _names
from hetero_ssfl.config import Config, ModelConfig
from hetero_ssfl.data import Images
from hetero_ssfl.errors import DataError
from hetero_ssfl.federation.participants.python_data import ClientData, PreparedClient, read_clients

RAD = slice(600, 620)


def members(clients: Sequence[Client], rad: object, config: Config | None = None) -> tuple[PreparedClient, ...]:
    """Prepare clients as a run does, without training."""
    config = config or Config(data={"validation": 0})  # type: ignore[arg-type]
    data = [ClientData(name, c.data, c.labels, c.test) for name, c in zip(_names(clients), clients, strict=True)]
    return read_clients(data, [ModelConfig(encoder="resnet8")] * len(clients), rad, config).clients


def test_training_data_of_one_client_are_never_test_data_of_another(digits: Images) -> None:
    assert digits.labels is not None
    x, y = digits.pixels[:40], digits.labels[:40]
    clients = [Client(x, net()), Client(x, net(), labels=y)]
    with pytest.raises(DataError, match="all 8 test samples of client-001 also occur in the training data of client-0"):
        members(clients, digits.pixels[RAD])


def test_a_test_set_within_the_training_data_is_refused(digits: Images) -> None:
    assert digits.labels is not None
    x, y = digits.pixels[:40], digits.labels[:40]
    with pytest.raises(DataError, match="all 5 test samples of client-000 also occur in the training data of client-0"):
        members([Client(x, net(), labels=y, test=(x[:5], y[:5]))], digits.pixels[RAD])


def test_test_images_that_are_in_the_rad_are_removed(digits: Images, caplog: pytest.LogCaptureFixture) -> None:
    x, y = digits.pixels, digits.labels
    assert y is not None
    client = Client(x[:40], net(), labels=y[:40], test=(x[600:650], y[600:650]))
    (member,) = members([client], x[RAD])
    assert torch.equal(member.test.pixels, x[620:650])
    assert member.test.labels is not None
    assert torch.equal(member.test.labels, y[620:650])
    assert "20 of 50 test samples of client-000 also occur in the RAD and are left out" in caplog.text


def test_validation_samples_that_another_client_trains_on_are_removed(
    digits: Images, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = digits.pixels, digits.labels
    assert y is not None
    config = load_config("smoke", ["data.validation=40"])
    clients = [Client(x[:100], net(), labels=y[:100]), Client(x[:5], net())]
    kept = members(clients, x[RAD], config)[0].validation
    trained = {image.numpy().tobytes() for image in x[:5]}
    assert not trained & {image.numpy().tobytes() for image in kept.pixels}
    assert "validation samples of client-000 also occur in the training data of client-001" in caplog.text


def test_a_limit_applies_to_each_client_is_balanced_and_keeps_the_test_data(digits: Images) -> None:
    x, y = digits.pixels, digits.labels
    assert y is not None
    order = y[:400].argsort()  # sorted by class: the first samples are all zeros
    clients = [Client(x[order], net(), labels=y[order]), Client(x[400:430], net()), Client(x[430:550], net())]
    config = Config(data={"validation": 0, "limit": 50})  # type: ignore[arg-type]
    found = members(clients, x[RAD], config)
    assert [len(member.train) for member in found] == [50, 30, 50]
    labels = found[0].train.labels
    assert labels is not None
    assert torch.bincount(labels).tolist() == [5] * 10
    assert len(found[0].test) == 80
    again = members(clients, x[RAD], config)
    assert torch.equal(again[2].train.pixels, found[2].train.pixels)

"""Mixed precision on the CPU: the same losses up to rounding, and networks that stay in float32."""

import pytest
import torch

from hetero_ssfl.config import Config, ModelConfig, load_config
from hetero_ssfl.learning.learner import build_learner
from hetero_ssfl.learning.training import TrainingClient, train
from hetero_ssfl.seeding import rng_for

MODEL = ModelConfig(encoder="resnet8(width=8)")


def make_client(config: Config) -> TrainingClient:
    learner = build_learner(MODEL, config.ssl, 3, 16, 0)
    pixels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8, generator=rng_for(0, "images"))
    return TrainingClient("client-000", config, learner, pixels, pixels[:8])


def losses(precision: str, *more: str) -> list[float]:
    """Return the losses of several local epochs."""
    config = load_config("smoke", [f"engine.precision={precision}", "optim.batch=16", "local_epochs=1", *more])
    client = make_client(config)
    found = [train(client, number)["loss_ssl"] for number in (1, 2, 3)]
    assert {p.dtype for p in client.learner.parameters()} == {torch.float32}
    return found


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("more", [[], ["optim.clip_norm=0.5"]], ids=["plain", "clipped"])
def test_half_precision_gives_nearly_the_same_losses(precision: str, more: list[str]) -> None:
    single, half = losses("float32", *more), losses(precision, *more)
    assert half == pytest.approx(single, rel=0.03)
    assert half != single  # half precision was used


def test_float16_gradients_are_scaled_and_clipped_at_their_true_size() -> None:
    """Clipping with a limit that no step reaches must change nothing, because it gets unscaled gradients."""
    assert losses("float16", "optim.clip_norm=1e6") == pytest.approx(losses("float16"), rel=1e-6)

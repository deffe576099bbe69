"""What a node accepts from a server: its `[limits]`. Costs are estimated before any work starts."""

import json
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ...config import Config, Section
from ...errors import ProtocolError
from ...methods.costs import Workload, disk_bytes, evaluation_seconds, memory_bytes, training_seconds

ACCELERATOR = 50.0  # times as fast as one core
MAX_NUMBER = 2**53
MAX_LINE = 1000  # of a config: the time to parse a dotted key grows with the square of its length
MAX_FRACTIONS = 20  # of evaluation.label_shares; each adds up to four figures to a reply


class LimitsConfig(Section):
    """What this node accepts from a server. Messages beyond these limits are refused."""

    weights_may_leave: bool = False
    """Whether to take part in methods that average weights."""
    evaluation: tuple[Literal["validation", "test"], ...] = ("validation", "test")
    """Images on which a server may ask for the accuracy of this node's encoder; [] for none."""
    message_mb: PositiveInt = 1024
    config_kb: PositiveInt = 64
    """Largest config in a message. It is checked before the config is parsed."""
    rounds: PositiveInt = 10_000
    local_epochs: PositiveInt = 100
    rad_images: PositiveInt = 100_000
    image_side: PositiveInt = 512
    """Largest side in pixels of the RAD's images, to which this node's images are resized."""
    cpu_seconds: PositiveFloat = 4 * 3600.0
    """Estimated processor time of one round of training, and of one evaluation. On an accelerator, one second counts
    as 50 seconds of one core."""
    memory_mb: PositiveInt = 8192
    """Estimated memory of training and evaluation."""
    disk_mb: PositiveInt = 20_000
    """Size of `home` and of this node's images in the image cache."""
    secure_only: bool = False
    """Whether to refuse rounds in which the server would see this node's own contribution (`privacy.secure`)."""
    participants: Annotated[int, Field(ge=3)] = 3
    """The smallest number of participants of a secure sum."""
    threshold: Annotated[float, Field(ge=0.6, lt=1)] = 2 / 3
    """The smallest `privacy.threshold` that this node accepts."""
    epsilon: PositiveFloat | None = None
    """The privacy budget of this node in all federations together. Rounds without noise, or beyond it, are refused, and
    no accuracy is reported, because it has no noise."""
    federations: Literal["first", "any"] | tuple[Annotated[str, Field(pattern="^[0-9a-f]{32}$")], ...] = "first"
    """Federations in which this node takes part in secure sums or sends noise: the first that asks, any, or those with
    these ids (`federation` in the server's `facts.json`)."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta at which this node computes what it has spent of `epsilon`, whatever the server's config names."""
    code: tuple[str, ...] = ()
    """Views, kernels, losses and optimisers (`package.module:name`) and methods (`package.module:name`, or the name of
    an installed method) that a server may use in addition to the built-in ones. No other code is imported."""


def check_text(limits: LimitsConfig, config_toml: str) -> None:
    """Raise ProtocolError for a config that is too large, or too costly to parse."""
    size = len(config_toml.encode()) / 1024
    if size > limits.config_kb:
        remedy = "Shorten it, or raise limits.config_kb in the node settings."
        raise ProtocolError(f"the server's config has {size:,.0f} KB, the limit is {limits.config_kb} KB. {remedy}")
    longest = max(map(len, config_toml.splitlines()), default=0)
    if longest > MAX_LINE:
        raise ProtocolError(f"the server's config has a line of {longest:,} characters, expected at most {MAX_LINE}.")


def check_numbers(who: str, config: Config) -> None:
    """Refuse numbers that no computation needs and that overflow in some."""

    def check(digits: str) -> None:
        if abs(int(digits)) > MAX_NUMBER:
            raise ProtocolError(f"{who} was asked for the number {digits[:12]}..., expected at most {MAX_NUMBER}.")

    json.loads(config.model_dump_json(), parse_int=check)


def check_costs(who: str, limits: LimitsConfig, config: Config, work: Workload) -> None:
    """Raise ProtocolError if following this config would cost the node more than its limits allow."""
    speed = ACCELERATOR if work.accelerated else 1.0
    mb = 2.0**20
    for what, unit, parts, scale, limit, key in (
        ("training in a round", "s", training_seconds(config, work), speed, limits.cpu_seconds, "cpu_seconds"),
        ("an evaluation", "s", evaluation_seconds(config, work), speed, limits.cpu_seconds, "cpu_seconds"),
        ("memory", "MB", memory_bytes(config, work), mb, limits.memory_mb, "memory_mb"),
        ("disk space", "MB", disk_bytes(config, work), mb, limits.disk_mb, "disk_mb"),
    ):
        total = sum(parts.values()) / scale
        if total > limit:
            most = max(parts, key=lambda name: parts[name])
            raise ProtocolError(
                f"{who} would need about {total:,.0f} {unit} for {what}, its limit is {limit:,.0f} {unit}; most of it "
                f"is for {most}. Lower that, or raise limits.{key} in the node settings."
            )

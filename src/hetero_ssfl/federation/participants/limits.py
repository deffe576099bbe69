"""What a node accepts from a server: its `[limits]`, and the cost of an instruction, estimated before any work starts.

Costs are sums of parts, and each part is named after the settings that cause it, so that a refusal can name them. Times
are for one core and come from counted operations, not from a clock: the same instruction is always judged the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ...config import Config, Section, flat
from ...data import Counts
from ...errors import ProtocolError
from ...learning.work import Work
from ...methods import HeteroSSFL, method_class

# Measured on one core (docs/deployment.md): estimates were within a factor of 2 of the time of real training.
MULTIPLY_ADDS, BYTES = 5e10, 4e9  # per second
SECONDS_PER_OPERATION, SECONDS_PER_STEP = 1e-5, 6e-3  # however small the batch is
ACCELERATOR = 50.0  # times as fast as one core
COPIES = 7  # of each parameter: weights, target, gradient, two of the optimiser, two while the state is saved
KEPT_STATES = 3  # two, and the one that is being written
LARGEST_NUMBER = 2**53
LONGEST_LINE = 1000  # of a config: the time to parse a dotted key grows with the square of its length
MOST_FRACTIONS = 20  # of evaluation.label_shares; each adds up to four figures to a reply


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
    epsilon: PositiveFloat | None = None
    """The privacy budget of this node in one federation. Rounds without noise, or beyond it, are refused, and no
    accuracy is reported, because it has no noise."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta at which this node computes what it has spent of `epsilon`, whatever the server's config names."""
    code: tuple[str, ...] = ()
    """Views, kernels, losses and optimisers (`package.module:name`) and methods (`package.module:name`, or the name of
    an installed method) that a server may use in addition to the built-in ones. No other code is imported."""


@dataclass(frozen=True)
class Held:
    """What a node brings to a run: its encoder for images of the RAD's shape, its images, and files of other runs."""

    encoder: Work
    images: Counts
    channels: int
    side: int
    other_files: int = 0
    accelerated: bool = False

    @property
    def image_bytes(self) -> int:
        return self.channels * self.side**2


def check_text(limits: LimitsConfig, config_toml: str) -> None:
    """Raise ProtocolError for a config that is too large, or too costly to parse."""
    size = len(config_toml.encode()) / 1024
    if size > limits.config_kb:
        raise ProtocolError(
            f"the config from the server has {size:,.0f} KB, the limit is {limits.config_kb} KB. "
            "Shorten it, or raise limits.config_kb in the node settings."
        )
    longest = max(map(len, config_toml.splitlines()), default=0)
    if longest > LONGEST_LINE:
        raise ProtocolError(
            f"the config from the server has a line of {longest:,} letters, expected at most {LONGEST_LINE}."
        )


def check_numbers(who: str, config: Config) -> None:
    """Refuse numbers that no computation needs and that overflow in some."""
    for key, value in flat(config.model_dump(mode="json")).items():
        for number in _numbers(value):
            if abs(number) > LARGEST_NUMBER and isinstance(number, int):
                raise ProtocolError(
                    f"{who} was asked for {key} = {str(number)[:12]}..., expected at most {LARGEST_NUMBER}."
                )


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _numbers(part)


def check_costs(who: str, limits: LimitsConfig, config: Config, held: Held) -> None:
    """Raise ProtocolError if following this config would cost the node more than its limits allow."""
    speed = ACCELERATOR if held.accelerated else 1.0
    mb = 2.0**20
    for what, unit, parts, scale, limit, key in (
        ("training in a round", "s", training_seconds(config, held), speed, limits.cpu_seconds, "cpu_seconds"),
        ("an evaluation", "s", evaluation_seconds(config, held), speed, limits.cpu_seconds, "cpu_seconds"),
        ("memory", "MB", memory_bytes(config, held), mb, limits.memory_mb, "memory_mb"),
        ("disk space", "MB", disk_bytes(config, held), mb, limits.disk_mb, "disk_mb"),
    ):
        total = sum(parts.values()) / scale
        if total > limit:
            most = max(parts, key=lambda name: parts[name])
            raise ProtocolError(
                f"{who} would need about {total:,.0f} {unit} for {what}, its limit is {limit:,.0f} {unit}; most of it "
                f"is for {most}. Lower that, or raise limits.{key} in the node settings."
            )


# --- the parts ---


def training_seconds(config: Config, held: Held) -> dict[str, float]:
    optim, views, ssl = config.optim, config.views.count, config.ssl
    images = held.images.train + (config.rad.size if config.rad.in_ssl else 0)
    batch = max(1, min(optim.batch, images))
    steps = images // batch * config.local_epochs
    passes = views * (3 + ssl.has_target)  # a backward pass costs two forward passes; the target has none
    step = SECONDS_PER_STEP + passes * _pass(config, held, batch)
    step += 3 * comb(views, 2) * batch * _outputs(config) * max(_outputs(config), batch) / MULTIPLY_ADDS  # the loss
    parts = {f"local_epochs = {config.local_epochs} with optim.batch = {optim.batch}": steps * step}
    parts[f"rad.size = {config.rad.size}"] = _pass(config, held, config.rad.size) + _factor_seconds(config, held)
    if _aligns(config):
        rad = config.alignment
        steps = -(-steps // rad.every) if rad.when == "step" else config.local_epochs
        rows, columns, width = _rows(config), _columns(config), _width(config, held)
        kernels = 3 * rows * min(rows * (width + columns), width**2 + columns**2 + width * columns)
        if rad.kernel != "linear" or rad.distance == "relational-kl":
            kernels = 3 * rows**2 * (width + columns)
        step = SECONDS_PER_STEP + 3 * _pass(config, held, _rad_batch(config)) + kernels / MULTIPLY_ADDS
        step += 1e-6 * rad.memory  # a loop over remembered rows
        parts[f"alignment.rad_batch = {rad.rad_batch} and memory = {rad.memory}"] = steps * step
    return parts


def evaluation_seconds(config: Config, held: Held) -> dict[str, float]:
    ask, (images, train, classes), width = config.evaluation, held.images, held.encoder.width
    fractions = len(ask.label_shares)
    steps = ask.epochs * -(-train // ask.batch)
    multiply_adds = width * ask.hidden + ask.hidden * classes if ask.hidden else width * classes
    fit = steps * (1e-3 if ask.hidden else 2e-4) + 3 * ask.epochs * train * multiply_adds / MULTIPLY_ADDS
    tuning = ask.finetune_epochs * sum(
        3 * _pass(config, held, max(classes, share * train)) + max(classes, share * train) / 64 * SECONDS_PER_STEP
        for share in ask.label_shares
    )
    return {
        "this node's images": _pass(config, held, images) + images * train * width / MULTIPLY_ADDS,
        f"evaluation.epochs = {ask.epochs} with batch = {ask.batch} and hidden = {ask.hidden}": (2 + fractions) * fit,
        f"{fractions} evaluation.label_shares with finetune_epochs = {ask.finetune_epochs}": tuning,
    }


def memory_bytes(config: Config, held: Held) -> dict[str, float]:
    ask, rad, (images, train, classes) = config.evaluation, config.alignment, held.images
    batch, views = min(config.optim.batch, train + config.rad.size), config.views.count
    heads, _ = _heads(config, held)
    live = held.encoder.activation_bytes + 4 * sum(config.ssl.projector) * 3 + 24 * held.image_bytes
    loss = comb(views, 2) * max(_outputs(config), batch) ** 2 * 4 if config.ssl.kind not in ("byol", "simsiam") else 0
    rows, columns, width = _rows(config), _columns(config), _width(config, held)
    kernels = 6 * 4 * rows**2 if rad.kernel != "linear" or rad.distance == "relational-kl" else 0
    kept = rad.memory * width * 4
    return {
        "this node's encoder": 4 * COPIES * held.encoder.parameters,
        f"ssl.projector = {list(config.ssl.projector)} and predictor = {config.ssl.predictor}": 4 * COPIES * heads
        + loss,
        f"optim.batch = {config.optim.batch} with views.count = {views}": batch * views * live,
        f"alignment.rad_batch = {rad.rad_batch} and memory = {rad.memory}": (
            _rad_batch(config) * live + kernels + kept if _aligns(config) else 0
        ),
        f"rad.size = {config.rad.size} and alignment.rank = {rad.rank}": (
            config.rad.size * (held.image_bytes + 32 * width + 24 * columns) + 32 * width**2
        ),
        f"images of side {held.side}": (images + train) * held.image_bytes + 512 * 3 * held.encoder.largest_bytes,
        f"evaluation.hidden = {ask.hidden} and batch = {ask.batch}": (
            16 * ask.hidden * (held.encoder.width + classes + min(ask.batch, train))
            + ask.batch * (8 + 4 * held.encoder.width)
            + 12 * images * held.encoder.width
        ),
    }


def disk_bytes(config: Config, held: Held) -> dict[str, float]:
    _, heads = _heads(config, held)
    encoders = 2 if config.ssl.kind == "byol" else 1
    return {
        "its other files": held.other_files,
        "this node's encoder": held.encoder.state_bytes * (KEPT_STATES * encoders + 1),  # and the finished model
        f"ssl.projector = {list(config.ssl.projector)} and predictor = {config.ssl.predictor}": KEPT_STATES * heads,
        f"images of side {held.side}": held.images.images * held.image_bytes,
        f"rad.size = {config.rad.size}": config.rad.size * held.image_bytes,
    }


# --- shared by the parts ---


def _pass(config: Config, held: Held, images: float) -> float:
    """Return the seconds of a forward pass of a batch through encoder and heads."""
    work, (hidden, outputs) = held.encoder, config.ssl.projector
    multiply_adds = work.multiply_adds + work.width * hidden + hidden * outputs + 2 * outputs * config.ssl.predictor
    each = multiply_adds / MULTIPLY_ADDS + (work.activation_bytes + 40 * held.image_bytes) / BYTES
    return SECONDS_PER_OPERATION * work.operations + images * each


def _heads(config: Config, held: Held) -> tuple[int, int]:
    """Return the number of parameters of projector and predictor, and the bytes of their saved state."""
    hidden, outputs = config.ssl.projector
    projector, predictor = (
        inputs * inner + inner * outputs + 6 * inner + outputs
        for inputs, inner in ((held.encoder.width, hidden), (outputs, config.ssl.predictor))
    )
    copies = 2 if config.ssl.kind == "byol" else 1
    return projector + predictor, 4 * (copies * projector + predictor)


def _factor_seconds(config: Config, held: Held) -> float:
    """Return the seconds of the factor, or of the sketch, of the kernel on the whole RAD."""
    if not _aligns(config):
        return 0.0
    rows, width = config.rad.size, _width(config, held)
    multiply_adds = 4 * rows * width**2 + 10 * width**3
    if config.alignment.form == "sketch":
        columns = min(config.alignment.rank, rows)
        multiply_adds += 4 * rows * columns**2 + 2 * rows * columns * width
    return 5 * multiply_adds / MULTIPLY_ADDS  # in double precision, with little reuse


def _aligns(config: Config) -> bool:
    return issubclass(method_class(config.method), HeteroSSFL)


def _outputs(config: Config) -> int:
    return config.ssl.projector[1]


def _width(config: Config, held: Held) -> int:
    return held.encoder.width if config.alignment.layer == "encoder" else _outputs(config)


def _rad_batch(config: Config) -> int:
    return min(config.alignment.rad_batch or config.rad.size, config.rad.size)


def _columns(config: Config) -> int:
    """Return the largest number of columns of the consensus, which must also fit into a message of 1 GB."""
    return min(config.alignment.rank, 2**28 // config.rad.size + 1)


def _rows(config: Config) -> int:
    """Return the number of rows of a comparison with the consensus."""
    return min(_rad_batch(config) + config.alignment.memory, config.rad.size)

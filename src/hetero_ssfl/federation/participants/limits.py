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
    epsilon: PositiveFloat | None = None
    """The privacy budget of this node in one federation. Rounds without noise, or beyond it, are refused, and no
    accuracy is reported, because it has no noise."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta at which this node computes what it has spent of `epsilon`, whatever the server's config names."""
    code: tuple[str, ...] = ()
    """Views, kernels, losses and optimisers (`package.module:name`) and methods (`package.module:name`, or the name of
    an installed method) that a server may use in addition to the built-in ones. No other code is imported."""


@dataclass(frozen=True)
class NodeLoad:
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
    if longest > MAX_LINE:
        raise ProtocolError(
            f"the config from the server has a line of {longest:,} characters, expected at most {MAX_LINE}."
        )


def check_numbers(who: str, config: Config) -> None:
    """Refuse numbers that no computation needs and that overflow in some."""
    for key, value in flat(config.model_dump(mode="json")).items():
        for number in _numbers(value):
            if abs(number) > MAX_NUMBER and isinstance(number, int):
                raise ProtocolError(
                    f"{who} was asked for {key} = {str(number)[:12]}..., expected at most {MAX_NUMBER}."
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


def check_costs(who: str, limits: LimitsConfig, config: Config, load: NodeLoad) -> None:
    """Raise ProtocolError if following this config would cost the node more than its limits allow."""
    costs, speed = Costs(config, load), ACCELERATOR if load.accelerated else 1.0
    mb = 2.0**20
    for what, unit, parts, scale, limit, key in (
        ("training in a round", "s", costs.training_seconds(), speed, limits.cpu_seconds, "cpu_seconds"),
        ("an evaluation", "s", costs.evaluation_seconds(), speed, limits.cpu_seconds, "cpu_seconds"),
        ("memory", "MB", costs.memory_bytes(), mb, limits.memory_mb, "memory_mb"),
        ("disk space", "MB", costs.disk_bytes(), mb, limits.disk_mb, "disk_mb"),
    ):
        total = sum(parts.values()) / scale
        if total > limit:
            most = max(parts, key=lambda name: parts[name])
            raise ProtocolError(
                f"{who} would need about {total:,.0f} {unit} for {what}, its limit is {limit:,.0f} {unit}; most of it "
                f"is for {most}. Lower that, or raise limits.{key} in the node settings."
            )


class Costs:
    """The estimated costs of a config for one node: parts by the settings that cause them."""

    def __init__(self, config: Config, load: NodeLoad) -> None:
        rad = config.alignment
        self.config, self.load = config, load
        self.aligns = issubclass(method_class(config.method), HeteroSSFL)
        self.hidden, self.outputs = config.ssl.projector
        self.width = load.encoder.width if rad.layer == "encoder" else self.outputs
        self.rad_batch = min(rad.rad_batch or config.rad.size, config.rad.size)
        self.rows = min(self.rad_batch + rad.memory, config.rad.size)  # of a comparison with the consensus
        self.columns = min(rad.rank, 2**28 // config.rad.size + 1)  # of a consensus that fits into a message of 1 GB
        self.linear = rad.kernel == "linear" and rad.distance != "relational-kl"
        self.heads = f"ssl.projector = {list(config.ssl.projector)} and predictor = {config.ssl.predictor}"
        # Parameters of the heads, and the bytes of their saved state.
        copies, encoder_width = 2 if config.ssl.kind == "byol" else 1, load.encoder.width
        projector, predictor = (
            inputs * inner + inner * self.outputs + 6 * inner + self.outputs
            for inputs, inner in ((encoder_width, self.hidden), (self.outputs, config.ssl.predictor))
        )
        self.head_parameters, self.head_bytes = projector + predictor, 4 * (copies * projector + predictor)

    def training_seconds(self) -> dict[str, float]:
        config, load = self.config, self.load
        optim, views, ssl = config.optim, config.views.count, config.ssl
        images = load.images.train + (config.rad.size if config.rad.in_ssl else 0)
        batch = max(1, min(optim.batch, images))
        steps = images // batch * config.local_epochs
        passes = views * (3 + ssl.has_target)  # a backward pass costs two forward passes; the target has none
        step = SECONDS_PER_STEP + passes * self._pass(batch)
        step += 3 * comb(views, 2) * batch * self.outputs * max(self.outputs, batch) / MULTIPLY_ADDS  # the loss
        parts = {f"local_epochs = {config.local_epochs} with optim.batch = {optim.batch}": steps * step}
        parts[f"rad.size = {config.rad.size}"] = self._pass(config.rad.size) + self._factor_seconds()
        if self.aligns:
            rad = config.alignment
            steps = -(-steps // rad.every) if rad.when == "step" else config.local_epochs
            rows, columns, width = self.rows, self.columns, self.width
            by_rows, by_columns = rows * (width + columns), width**2 + columns**2 + width * columns
            kernels = 3 * rows * (min(by_rows, by_columns) if self.linear else by_rows)
            step = SECONDS_PER_STEP + 3 * self._pass(self.rad_batch) + kernels / MULTIPLY_ADDS
            step += 1e-6 * rad.memory  # a loop over remembered rows
            parts[f"alignment.rad_batch = {rad.rad_batch} and memory = {rad.memory}"] = steps * step
        return parts

    def evaluation_seconds(self) -> dict[str, float]:
        ask, (images, train, classes), width = self.config.evaluation, self.load.images, self.load.encoder.width
        fractions = len(ask.label_shares)
        steps = ask.epochs * -(-train // ask.batch)
        multiply_adds = width * ask.hidden + ask.hidden * classes if ask.hidden else width * classes
        fit = steps * (1e-3 if ask.hidden else 2e-4) + 3 * ask.epochs * train * multiply_adds / MULTIPLY_ADDS
        tuning = ask.finetune_epochs * sum(
            3 * self._pass(max(classes, share * train)) + max(classes, share * train) / 64 * SECONDS_PER_STEP
            for share in ask.label_shares
        )
        return {
            "this node's images": self._pass(images) + images * train * width / MULTIPLY_ADDS,
            f"evaluation.epochs = {ask.epochs} with batch = {ask.batch} and hidden = {ask.hidden}": (2 + fractions)
            * fit,
            f"{fractions} evaluation.label_shares with finetune_epochs = {ask.finetune_epochs}": tuning,
        }

    def memory_bytes(self) -> dict[str, float]:
        config, load = self.config, self.load
        ask, rad, (images, train, classes) = config.evaluation, config.alignment, load.images
        batch, views = min(config.optim.batch, train + config.rad.size), config.views.count
        live = load.encoder.activation_bytes + 4 * sum(config.ssl.projector) * 3 + 24 * load.image_bytes
        loss = comb(views, 2) * max(self.outputs, batch) ** 2 * 4 if config.ssl.kind not in ("byol", "simsiam") else 0
        kernels = 0 if self.linear else 6 * 4 * self.rows**2
        kept = rad.memory * self.width * 4
        return {
            "this node's encoder": 4 * COPIES * load.encoder.parameters,
            self.heads: 4 * COPIES * self.head_parameters + loss,
            f"optim.batch = {config.optim.batch} with views.count = {views}": batch * views * live,
            f"alignment.rad_batch = {rad.rad_batch} and memory = {rad.memory}": (
                self.rad_batch * live + kernels + kept if self.aligns else 0
            ),
            f"rad.size = {config.rad.size} and alignment.rank = {rad.rank}": (
                config.rad.size * (load.image_bytes + 32 * self.width + 24 * self.columns) + 32 * self.width**2
            ),
            f"images of side {load.side}": (images + train) * load.image_bytes + 512 * 3 * load.encoder.largest_bytes,
            f"evaluation.hidden = {ask.hidden} and batch = {ask.batch}": (
                16 * ask.hidden * (load.encoder.width + classes + min(ask.batch, train))
                + ask.batch * (8 + 4 * load.encoder.width)
                + 12 * images * load.encoder.width
            ),
        }

    def disk_bytes(self) -> dict[str, float]:
        config, load = self.config, self.load
        encoders = 2 if config.ssl.kind == "byol" else 1
        return {
            "its other files": load.other_files,
            "this node's encoder": load.encoder.state_bytes * (KEPT_STATES * encoders + 1),  # and the finished model
            self.heads: KEPT_STATES * self.head_bytes,
            f"images of side {load.side}": load.images.images * load.image_bytes,
            f"rad.size = {config.rad.size}": config.rad.size * load.image_bytes,
        }

    def _pass(self, images: float) -> float:
        """Return the seconds of a forward pass of a batch through encoder and heads."""
        work, hidden, outputs = self.load.encoder, self.hidden, self.outputs
        heads = work.width * hidden + hidden * outputs + 2 * outputs * self.config.ssl.predictor
        each = (work.multiply_adds + heads) / MULTIPLY_ADDS
        each += (work.activation_bytes + 40 * self.load.image_bytes) / BYTES
        return SECONDS_PER_OPERATION * work.operations + images * each

    def _factor_seconds(self) -> float:
        """Return the seconds of the factor, or of the sketch, of the kernel on the whole RAD."""
        if not self.aligns:
            return 0.0
        config, rows, width = self.config, self.config.rad.size, self.width
        multiply_adds = 4 * rows * width**2 + 10 * width**3
        if config.alignment.form == "sketch":
            columns = min(config.alignment.rank, rows)
            multiply_adds += 4 * rows * columns**2 + 2 * rows * columns * width
        return 5 * multiply_adds / MULTIPLY_ADDS  # in double precision, with little reuse

"""The cost of a run for one client, estimated before any work starts: time, memory, disk space and messages.

Costs are sums of parts, and each part is named after the settings that cause it, so that a refusal can name them. Times
are for one core and come from counted operations, not from a clock: the same instruction is always judged the same.
"""

from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from ..config import Config
from ..data import Counts
from ..learning.floors import MAX_SIDE
from ..learning.forward_cost import Work
from ..learning.learner import Learner
from . import FedSSL, HeteroSSFL, Local, method_class
from .averaging import shared_weights

# Measured on one core (docs/deployment.md): estimates were within a factor of 2 of the time of real training.
MULTIPLY_ADDS, BYTES = 5e10, 4e9  # per second
SECONDS_PER_OPERATION, SECONDS_PER_STEP = 1e-5, 6e-3  # however small the batch is
COPIES = 7  # of each parameter: weights, target, gradient, two of the optimiser, two while the state is saved
KEPT_STATES = 3  # two, and the one that is being written


@dataclass(frozen=True)
class Workload:
    """What a client brings to a run: its encoder for images of the RAD's shape, its images, and files of other runs."""

    encoder: Work
    images: Counts
    channels: int
    side: int
    other_files: int = 0
    accelerated: bool = False

    @property
    def image_bytes(self) -> int:
        return self.channels * self.side**2


def training_seconds(config: Config, work: Workload) -> dict[str, float]:
    optim, views, ssl = config.optim, config.views.count, config.ssl
    images = work.images.train + (config.rad.size if config.rad.in_ssl else 0)
    batch = max(1, min(optim.batch, images))
    steps = images // batch * config.local_epochs
    passes = views * (3 + ssl.has_target)  # a backward pass costs two forward passes; the target has none
    if method_class(config.method).needs_labels:
        passes = 3  # one view, and no target
    step = SECONDS_PER_STEP + passes * _pass(config, work, batch)
    step += 3 * comb(views, 2) * batch * _outputs(config) * max(_outputs(config), batch) / MULTIPLY_ADDS  # the loss
    if optim.kind == "muon":  # ten products with each matrix, whose smaller side is about the width of the features
        step += 10 * work.encoder.parameters * work.encoder.width / MULTIPLY_ADDS
    if _has_head(config) and config.rad.in_ssl:
        step += 3 * views * batch * _head(config, work) / MULTIPLY_ADDS
    parts = {f"local_epochs = {config.local_epochs} with optim.batch = {optim.batch}": steps * step}
    parts[f"rad.size = {config.rad.size}"] = _pass(config, work, config.rad.size) + _factor_seconds(config, work)
    if _aligns(config) and config.alignment.mu and not (_has_head(config) and config.rad.in_ssl):
        rad = config.alignment
        steps = -(-steps // rad.every) if rad.when == "step" else config.local_epochs
        rows, columns, width = _rows(config), _columns(config), _width(config, work)
        kernels = 3 * rows * min(rows * (width + columns), width**2 + columns**2 + width * columns)
        if rad.kernel != "linear" or rad.distance == "relational-kl":
            kernels = 3 * rows**2 * (width + columns)
        step = SECONDS_PER_STEP + 3 * _pass(config, work, _rad_batch(config)) + kernels / MULTIPLY_ADDS
        step += 1e-6 * rad.memory  # a loop over remembered rows
        parts[f"alignment.rad_batch = {rad.rad_batch} and memory = {rad.memory}"] = steps * step
    return parts


def evaluation_seconds(config: Config, work: Workload) -> dict[str, float]:
    ask, (images, train, classes), width = config.evaluation, work.images, work.encoder.width
    fractions = len(ask.label_shares)
    steps = ask.epochs * -(-train // ask.batch)
    multiply_adds = width * ask.hidden + ask.hidden * classes if ask.hidden else width * classes
    fit = steps * (1e-3 if ask.hidden else 2e-4) + 3 * ask.epochs * train * multiply_adds / MULTIPLY_ADDS
    tuning = ask.finetune_epochs * sum(
        3 * _pass(config, work, max(classes, share * train)) + max(classes, share * train) / 64 * SECONDS_PER_STEP
        for share in ask.label_shares
    )
    return {
        "this node's images": _pass(config, work, images) + images * train * width / MULTIPLY_ADDS,
        f"evaluation.epochs = {ask.epochs} with batch = {ask.batch} and hidden = {ask.hidden}": (2 + fractions) * fit,
        f"evaluation.floors = {str(ask.floors).lower()}": _floor_seconds(config, work) if ask.floors else 0,
        f"{fractions} evaluation.label_shares with finetune_epochs = {ask.finetune_epochs}": tuning,
    }


def _floor_seconds(config: Config, work: Workload) -> float:
    """Return the seconds to probe the features of learning/floors.py, of which raw pixels are the widest."""
    ask, (images, train, classes) = config.evaluation, work.images
    widest = work.channels * min(work.side, MAX_SIDE) ** 2
    probes = 3 * ask.epochs * train * classes * (widest + 2 * work.encoder.width + 256)
    axes = 20 * train * widest * (work.encoder.width + 16)
    return (probes + axes + 2 * images * train * widest + images * work.side**2 * 64 * 64 * 9) / MULTIPLY_ADDS


def memory_bytes(config: Config, work: Workload) -> dict[str, float]:
    ask, rad, (images, train, classes) = config.evaluation, config.alignment, work.images
    batch, views = min(config.optim.batch, train + config.rad.size), config.views.count
    heads, _ = _heads(config, work)
    live = work.encoder.activation_bytes + 4 * sum(config.ssl.projector) * 3 + 24 * work.image_bytes
    loss = comb(views, 2) * max(_outputs(config), batch) ** 2 * 4 if config.ssl.kind not in ("byol", "simsiam") else 0
    rows, columns, width = _rows(config), _columns(config), _width(config, work)
    kernels = 6 * 4 * rows**2 if rad.kernel != "linear" or rad.distance == "relational-kl" else 0
    kept = rad.memory * width * 4
    return {
        "this node's encoder": 4 * COPIES * work.encoder.parameters,
        f"ssl.projector = {list(config.ssl.projector)} and predictor = {config.ssl.predictor}": 4 * COPIES * heads
        + loss,
        f"optim.batch = {config.optim.batch} with views.count = {views}": batch * views * live,
        f"alignment.rad_batch = {rad.rad_batch} and memory = {rad.memory}": (
            _rad_batch(config) * live + kernels + kept if _aligns(config) else 0
        ),
        f"alignment.coordinates = {rad.coordinates}": (
            4 * COPIES * _head(config, work) + 12 * rad.coordinates * (config.rad.size + batch * views)
            if _has_head(config)
            else 0
        ),
        f"rad.size = {config.rad.size} and alignment.rank = {rad.rank}": (
            config.rad.size * (work.image_bytes + 32 * width + 24 * columns) + 32 * width**2
        ),
        f"images of side {work.side}": (images + train) * work.image_bytes + 512 * 3 * work.encoder.largest_bytes,
        f"evaluation.hidden = {ask.hidden} and batch = {ask.batch}": (
            16 * ask.hidden * (work.encoder.width + classes + min(ask.batch, train))
            + ask.batch * (8 + 4 * work.encoder.width)
            + 12 * images * work.encoder.width
        ),
    }


def disk_bytes(config: Config, work: Workload) -> dict[str, float]:
    _, heads = _heads(config, work)
    encoders = 2 if config.ssl.kind == "byol" else 1
    return {
        "its other files": work.other_files,
        "this node's encoder": work.encoder.state_bytes * (KEPT_STATES * encoders + 1),  # and the finished model
        f"ssl.projector = {list(config.ssl.projector)} and predictor = {config.ssl.predictor}": KEPT_STATES * heads,
        f"alignment.coordinates = {config.alignment.coordinates}": 4 * KEPT_STATES * _head(config, work),
        f"images of side {work.side}": work.images.images * work.image_bytes,
        f"rad.size = {config.rad.size}": config.rad.size * work.image_bytes,
    }


# --- messages ---


def message_bytes(config: Config, learner: Learner, sample: Tensor) -> int | None:
    """Return the bytes per client and round in both directions; None for a method whose messages are not known."""
    kind = method_class(config.method)
    if issubclass(kind, Local):
        return 0
    if issubclass(kind, FedSSL):
        return 2 * sum(w.numel() * w.element_size() for w in shared_weights(learner, kind.shared).values())
    if not issubclass(kind, HeteroSSFL):
        return None
    with torch.no_grad():
        width = learner.eval().represent(sample, config.alignment.layer).shape[1]
    rank, rows, size = config.alignment.rank, config.rad.size, 2 if config.alignment.wire == "float16" else 4
    up, down = min(width, rank), min(width * config.clients.count, rank)
    if config.alignment.form == "sketch":
        up = down = min(rank, rows)
    if _has_head(config):
        down = config.alignment.coordinates
    return rows * (up + down) * size


# --- shared by the parts ---


def _pass(config: Config, work: Workload, images: float) -> float:
    """Return the seconds of a forward pass of a batch through encoder and heads."""
    encoder, (hidden, outputs) = work.encoder, config.ssl.projector
    heads = encoder.width * hidden + hidden * outputs + 2 * outputs * config.ssl.predictor
    each = (encoder.multiply_adds + heads) / MULTIPLY_ADDS + (encoder.activation_bytes + 40 * work.image_bytes) / BYTES
    return SECONDS_PER_OPERATION * encoder.operations + images * each


def _heads(config: Config, work: Workload) -> tuple[int, int]:
    """Return the number of parameters of projector and predictor, and the bytes of their saved state."""
    hidden, outputs = config.ssl.projector
    projector, predictor = (
        inputs * inner + inner * outputs + 6 * inner + outputs
        for inputs, inner in ((work.encoder.width, hidden), (outputs, config.ssl.predictor))
    )
    copies = 2 if config.ssl.kind == "byol" else 1
    return projector + predictor, 4 * (copies * projector + predictor)


def _factor_seconds(config: Config, work: Workload) -> float:
    """Return the seconds of the factor, or of the sketch, of the kernel on the whole RAD."""
    if not _aligns(config):
        return 0.0
    rows, width = config.rad.size, _width(config, work)
    multiply_adds = 4 * rows * width**2 + 10 * width**3
    if config.alignment.form == "sketch":
        columns = min(config.alignment.rank, rows)
        multiply_adds += 4 * rows * columns**2 + 2 * rows * columns * width
    return 5 * multiply_adds / MULTIPLY_ADDS  # in double precision, with little reuse


def _has_head(config: Config) -> bool:
    return _aligns(config) and config.alignment.distance == "coordinates"


def _head(config: Config, work: Workload) -> int:
    """Return the number of parameters of the head that predicts coordinates."""
    return (work.encoder.width + 1) * config.alignment.coordinates if _has_head(config) else 0


def _aligns(config: Config) -> bool:
    return issubclass(method_class(config.method), HeteroSSFL)


def _outputs(config: Config) -> int:
    return config.ssl.projector[1]


def _width(config: Config, work: Workload) -> int:
    return work.encoder.width if config.alignment.layer == "encoder" else _outputs(config)


def _rad_batch(config: Config) -> int:
    return min(config.alignment.rad_batch or config.rad.size, config.rad.size)


def _columns(config: Config) -> int:
    """Return the largest number of columns of the consensus, which must also fit into a message of 1 GB."""
    return min(config.alignment.rank, 2**28 // config.rad.size + 1)


def _rows(config: Config) -> int:
    """Return the number of rows of a comparison with the consensus."""
    return min(_rad_batch(config) + config.alignment.memory, config.rad.size)

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


class _Sizes:
    """Sizes that several costs depend on."""

    def __init__(self, config: Config, work: Workload) -> None:
        alignment, rad, inner = config.alignment, config.rad.size, config.ssl.predictor
        hidden, outputs = config.ssl.projector
        self.encoder, self.image_bytes, self.outputs = work.encoder, work.image_bytes, outputs
        self.aligns = issubclass(method_class(config.method), HeteroSSFL)
        self.coordinates = alignment.coordinates if self.aligns and alignment.distance == "coordinates" else 0
        self.head = (work.encoder.width + 1) * self.coordinates  # parameters
        self.rad_batch = min(alignment.rad_batch or rad, rad)
        self.rows = min(self.rad_batch + alignment.memory, rad)  # of a comparison with the consensus
        self.columns = min(alignment.rank, 2**28 // rad + 1)  # of the consensus, which must also fit into 1 GB
        self.width = work.encoder.width if alignment.layer == "encoder" else outputs
        self.has_kernels = alignment.kernel != "linear" or alignment.distance == "relational-kl"
        projector = work.encoder.width * hidden + hidden * outputs + 6 * hidden + outputs
        predictor = 2 * outputs * inner + 6 * inner + outputs
        self.networks = 2 if config.ssl.kind == "byol" else 1  # with the target
        self.heads, self.heads_bytes = projector + predictor, 4 * (self.networks * projector + predictor)
        self.heads_work = work.encoder.width * hidden + hidden * outputs + 2 * outputs * inner  # multiply-adds

    def forward(self, images: float) -> float:
        """Return the seconds of a forward pass of a batch through encoder and heads."""
        each = (self.encoder.multiply_adds + self.heads_work) / MULTIPLY_ADDS
        each += (self.encoder.activation_bytes + 40 * self.image_bytes) / BYTES
        return SECONDS_PER_OPERATION * self.encoder.operations + images * each


def training_seconds(config: Config, work: Workload) -> dict[str, float]:
    sizes, optim, views, alignment = _Sizes(config, work), config.optim, config.views.count, config.alignment
    images = work.images.train + (config.rad.size if config.rad.in_ssl else 0)
    batch = max(1, min(optim.batch, images))
    epochs = config.epochs_of(max(1, images))
    steps = images // batch * epochs
    passes = views * (3 + config.ssl.has_target)  # a backward pass costs two forward passes; the target has none
    passes = 3 if method_class(config.method).needs_labels else passes  # one view, and no target
    step = SECONDS_PER_STEP + passes * sizes.forward(batch)
    step += 3 * comb(views, 2) * batch * sizes.outputs * max(sizes.outputs, batch) / MULTIPLY_ADDS  # the loss
    if optim.kind == "muon":  # ten products with each matrix, whose smaller side is about the width of the features
        step += 10 * work.encoder.parameters * work.encoder.width / MULTIPLY_ADDS
    if in_loss := bool(sizes.coordinates) and config.rad.in_ssl:
        step += 3 * views * batch * (sizes.head + sizes.coordinates * config.rad.size) / MULTIPLY_ADDS
    parts = {f"local_epochs = {epochs} with optim.batch = {optim.batch}": steps * step}
    parts[f"rad.size = {config.rad.size}"] = sizes.forward(config.rad.size) + _factor_seconds(config, sizes)
    if sizes.aligns and alignment.mu and not in_loss:
        steps = -(-steps // alignment.every) if alignment.when == "step" else epochs
        rows, columns, width = sizes.rows, sizes.columns, sizes.width
        products, with_factors = rows * (width + columns), width**2 + columns**2 + width * columns
        kernels = 3 * rows * (products if sizes.has_kernels else min(products, with_factors))
        step = SECONDS_PER_STEP + 3 * sizes.forward(sizes.rad_batch) + kernels / MULTIPLY_ADDS
        step += 1e-6 * alignment.memory  # a loop over remembered rows
        parts[f"alignment.rad_batch = {alignment.rad_batch} and memory = {alignment.memory}"] = steps * step
    return parts


def _factor_seconds(config: Config, sizes: _Sizes) -> float:
    """Return the seconds of the factor, or of the sketch, of the kernel on the whole RAD."""
    if not sizes.aligns:
        return 0.0
    rows, width = config.rad.size, sizes.width
    multiply_adds = 4 * rows * width**2 + 10 * width**3
    if config.alignment.form == "sketch":
        columns = min(config.alignment.rank, rows)
        multiply_adds += 4 * rows * columns**2 + 2 * rows * columns * width
    return 5 * multiply_adds / MULTIPLY_ADDS  # in double precision, with little reuse


def evaluation_seconds(config: Config, work: Workload) -> dict[str, float]:
    ask, (images, train, classes), width = config.evaluation, work.images, work.encoder.width
    sizes, fractions = _Sizes(config, work), len(ask.label_shares)
    steps = ask.epochs * -(-train // ask.batch)
    multiply_adds = width * ask.hidden + ask.hidden * classes if ask.hidden else width * classes
    fit = steps * (1e-3 if ask.hidden else 2e-4) + 3 * ask.epochs * train * multiply_adds / MULTIPLY_ADDS
    labeled = [max(classes, share * train) for share in ask.label_shares]
    tuning = sum(3 * sizes.forward(count) + count / 64 * SECONDS_PER_STEP for count in labeled)
    fits = 2 + fractions + ask.common_space * max(1, sizes.coordinates / width)
    shares = f"{fractions} evaluation.label_shares with finetune_epochs = {ask.finetune_epochs}"
    return {
        "this node's images": sizes.forward(images) + images * train * width / MULTIPLY_ADDS,
        f"evaluation.epochs = {ask.epochs} with batch = {ask.batch} and hidden = {ask.hidden}": fits * fit,
        f"evaluation.floors = {str(ask.floors).lower()}": _floor_seconds(config, work) if ask.floors else 0,
        shares: ask.finetune_epochs * tuning,
    }


def _floor_seconds(config: Config, work: Workload) -> float:
    """Return the seconds to probe the features of learning/floors.py, of which raw pixels are the widest."""
    images, train, classes = work.images
    widest = work.channels * min(work.side, MAX_SIDE) ** 2
    probes = 3 * config.evaluation.epochs * train * classes * (widest + 2 * work.encoder.width + 256)
    axes = 20 * train * widest * (work.encoder.width + 16)
    return (probes + axes + 2 * images * train * widest + images * work.side**2 * 64 * 64 * 9) / MULTIPLY_ADDS


def memory_bytes(config: Config, work: Workload) -> dict[str, float]:
    ask, alignment, ssl, (images, train, classes) = config.evaluation, config.alignment, config.ssl, work.images
    sizes, rad, views = _Sizes(config, work), config.rad.size, config.views.count
    batch = min(config.optim.batch, train + rad)
    live = work.encoder.activation_bytes + 4 * sum(ssl.projector) * 3 + 24 * work.image_bytes
    loss = comb(views, 2) * max(sizes.outputs, batch) ** 2 * 4 if ssl.kind not in ("byol", "simsiam") else 0
    kernels = 6 * 4 * sizes.rows**2 if sizes.has_kernels else 0
    term = sizes.rad_batch * live + kernels + alignment.memory * sizes.width * 4
    probe = 16 * ask.hidden * (work.encoder.width + classes + min(ask.batch, train))
    probe += ask.batch * (8 + 4 * work.encoder.width) + 12 * images * work.encoder.width
    head = 4 * COPIES * sizes.head + 12 * sizes.coordinates * (rad + batch * views)
    head += 16 * batch * views * rad if sizes.coordinates else 0  # where each view lies among the RAD images
    kernel = rad * (work.image_bytes + 32 * sizes.width + 24 * sizes.columns) + 32 * sizes.width**2
    return {
        "this node's encoder": 4 * COPIES * work.encoder.parameters,
        f"ssl.projector = {list(ssl.projector)} and predictor = {ssl.predictor}": 4 * COPIES * sizes.heads + loss,
        f"optim.batch = {config.optim.batch} with views.count = {views}": batch * views * live,
        f"alignment.rad_batch = {alignment.rad_batch} and memory = {alignment.memory}": term if sizes.aligns else 0,
        f"alignment.coordinates = {alignment.coordinates}": head,
        f"rad.size = {rad} and alignment.rank = {alignment.rank}": kernel,
        f"images of side {work.side}": (images + train) * work.image_bytes + 512 * 3 * work.encoder.largest_bytes,
        f"evaluation.hidden = {ask.hidden} and batch = {ask.batch}": probe,
    }


def disk_bytes(config: Config, work: Workload) -> dict[str, float]:
    sizes, ssl = _Sizes(config, work), config.ssl
    return {
        "its other files": work.other_files,
        "this node's encoder": work.encoder.state_bytes * (KEPT_STATES * sizes.networks + 1),  # and the finished model
        f"ssl.projector = {list(ssl.projector)} and predictor = {ssl.predictor}": KEPT_STATES * sizes.heads_bytes,
        f"alignment.coordinates = {config.alignment.coordinates}": 4 * KEPT_STATES * sizes.head,
        f"images of side {work.side}": work.images.images * work.image_bytes,
        f"rad.size = {config.rad.size}": config.rad.size * work.image_bytes,
    }


def message_bytes(config: Config, learner: Learner, sample: Tensor) -> int | None:
    """Return the bytes per client and round in both directions; None for a method whose messages are not known."""
    kind, alignment = method_class(config.method), config.alignment
    if issubclass(kind, Local):
        return 0
    if issubclass(kind, FedSSL):
        return 2 * sum(w.numel() * w.element_size() for w in shared_weights(learner, kind.shared).values())
    if not issubclass(kind, HeteroSSFL):
        return None
    with torch.no_grad():
        width = learner.eval().represent(sample, alignment.layer).shape[1]
    rank, rows = alignment.rank, config.rad.size
    up, down = min(width, rank), min(width * config.clients.count, rank)
    if alignment.form == "sketch":
        up = down = min(rank, rows)
    if alignment.distance == "coordinates":
        down = alignment.coordinates
    return rows * (up + down) * (2 if alignment.wire == "float16" else 4)

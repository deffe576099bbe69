"""The frozen, validated config of a run. Every choice that the paper leaves open is a setting here."""

import re
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0, le=1)]
Layer = Literal["encoder", "projector", "predictor"]
Precision = Literal["float32", "bfloat16", "float16"]


def named_code(*known: str) -> AfterValidator:
    """Accept one of the known names, or the name of the user's own callable."""

    def check(value: str) -> str:
        if value not in known and not re.fullmatch(r"[\w.]+:[\w.-]+", value):
            choices = f"{', '.join(known)} or " if known else ""
            raise ValueError(f"should be {choices}package.module:callable")
        return value

    return AfterValidator(check)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(Section):
    source: str = "digits"
    """`digits`, `cifar10`, `cifar100`, `tiny-imagenet`, a local path, or a hub id."""
    side: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Resize (and centre-crop) every image to this many pixels; required for images of mixed sizes."""
    channels: Literal[1, 3] | None = None
    """Grey (1) or colour (3); by default as in the first image."""
    limit: PositiveInt | None = None
    """Use only this many training images, balanced over the classes and chosen by the seed."""
    validation: NonNegativeInt = 200
    """Training images held out for choosing settings; none without labels. By default at most a tenth of the images."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do with an image that cannot be read: stop, or skip and count it."""
    image_column: str | None = None
    """The column of a parquet file or hub data set that contains the images; found by itself if there is one."""
    label_column: str | None = None
    """The column of a table's labels, numbers or words; by default `label` or `fine_label`. "none": use no labels."""


class PartitionConfig(Section):
    kind: Literal["iid", "classes", "dirichlet", "shards"] = "classes"
    """How images are divided: at random, by whole classes, by a Dirichlet distribution, or by shards."""
    classes_per_client: PositiveInt | None = None
    """For `classes`: by default the number of classes divided by the number of clients (at least 1)."""
    alpha: PositiveFloat = 0.5
    """For `dirichlet`: smaller values make the clients more unequal."""
    shards_per_client: PositiveInt = 2
    """For `shards`: the sorted images are cut into equal pieces, and each client gets this many."""


class RadConfig(Section):
    """The Representation Alignment Dataset: unlabeled images that every participant has."""

    size: PositiveInt = 300
    """Number of RAD images; by default at most a fifth of the training images, or all of `rad.source`."""
    source: str | None = None
    """Another data set to take the RAD from; by default, training images that no client has."""
    in_ssl: bool = False
    """Also train the local self-supervised loss on the RAD images."""


class ModelConfig(Section):
    encoder: str
    """A name with options, such as `resnet10(width=16)`, `timm:NAME` or `package.module:callable`."""
    projector: tuple[PositiveInt, PositiveInt] | None = None
    """(hidden, output) widths; by default as in `[ssl]`."""
    predictor: PositiveInt | None = None
    """Hidden width; by default as in `[ssl]`."""
    gpu_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of the GPU's memory for a client that trains this model; by default 1 / the number of workers."""


def as_model(value: Any) -> Any:
    return {"encoder": value} if isinstance(value, str) else value


class SeatConfig(Section):
    """What the operator of a federation knows about a node."""

    name: str
    node: PositiveInt | None = None
    """Flower's id of the node, which belongs to its registered key."""
    images: PositiveInt | None = None
    """The largest number of images that it can claim."""


class ClientsConfig(Section):
    count: PositiveInt = 5
    """Number of clients."""
    per_round: PositiveInt | Annotated[float, Field(gt=0, le=1)] = 1.0
    """Clients that take part in each round: a number of clients, or a fraction of all clients."""
    models: tuple[Annotated[ModelConfig, BeforeValidator(as_model)], ...] = Field(
        default=(ModelConfig(encoder="resnet10(width=16)"),), min_length=1
    )
    """Client k uses entry k modulo the length of the list."""
    weights: Literal["uniform", "size"] | tuple[PositiveFloat, ...] = "uniform"
    """Weights w_j of the consensus: equal, by number of images, or one value per client."""
    seats: tuple[SeatConfig, ...] = ()
    """Real federations: the only nodes that may take part, such as `{name = "hospital-a", node = 1234, images = 5000}`
    with Flower's id of the node and the largest number of images that it can claim. By default, any registered node."""
    newcomers: NonNegativeInt = 0
    """Real federations: number of nodes beyond `count` that may join during the run."""
    rejoin: Literal["key", "name"] = "key"
    """Real federations: a name belongs to the node that had it first; or, for nodes without keys, to any node."""
    size_ratio: Annotated[float, Field(ge=1)] = 2.0
    """Real federations: a number of images that a node claims counts up to this multiple of the median."""
    absent_rounds: NonNegativeInt = 10
    """Real federations: rounds after which the contribution of a disconnected node is removed; 0 for never."""

    def selected_per_round(self, present: int | None = None) -> int:
        """Return the number of clients per round, out of those `present` or, by default, of all clients."""
        of = self.count if present is None else present
        return min(self.per_round, of) if isinstance(self.per_round, int) else max(1, round(self.per_round * of))


class SslConfig(Section):
    kind: Annotated[str, named_code("byol", "simsiam", "vicreg", "simclr", "barlow-twins")] = "byol"
    """The local loss. Or your own, as `package.module:callable`: (learner, views) -> (loss, projections)."""
    projector: tuple[PositiveInt, PositiveInt] = (256, 128)
    """Hidden and output width of the projector."""
    predictor: PositiveInt = 256
    """Hidden width of the predictor."""
    normalize: bool = True
    """true: BYOL's original loss, squared error of unit vectors; false: the paper's squared error of raw outputs."""
    symmetric: bool = True
    """BYOL, SimSiam: sum the loss over both orders of two views; false: predict the second from the first only."""
    ema: Fraction = 0.99
    """BYOL: the fraction of the old target network that is kept at each step."""
    ema_end: Fraction | None = None
    """BYOL: the value of `ema` at the end of the run, reached along a cosine (BYOL paper: 1). By default constant."""
    temperature: PositiveFloat = 0.5
    """SimCLR: the temperature of the softmax."""
    invariance: NonNegativeFloat = 25.0
    """VICReg: the weight of the distance between views."""
    variance: NonNegativeFloat = 25.0
    """VICReg: the weight of the penalty for standard deviations below 1."""
    covariance: NonNegativeFloat = 1.0
    """VICReg: the weight of covariances between dimensions."""
    redundancy: NonNegativeFloat = 0.005
    """Barlow Twins: the weight of correlations between dimensions."""

    @property
    def has_target(self) -> bool:
        """Whether there is a target network: for BYOL, and for the user's own loss, which may use it."""
        return self.kind == "byol" or ":" in self.kind


class OptimConfig(Section):
    kind: Annotated[str, named_code("sgd", "adamw", "lars")] = "sgd"
    """The optimiser. Or your own, as `package.module:callable`: (parameters, lr) -> torch.optim.Optimizer."""
    lr: PositiveFloat = 0.032
    """Learning rate, before schedule and warm-up."""
    momentum: Fraction = 0.9
    """Momentum of SGD and LARS."""
    weight_decay: NonNegativeFloat = 5e-4
    """Weight decay."""
    batch: Annotated[int, Field(ge=2)] = 128
    """Images per step."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The cosine decay covers the whole run, not each round."""
    warmup: NonNegativeFloat = 0.0
    """Rounds over which the learning rate rises linearly from 0 (0.5 is half a round)."""
    clip_norm: PositiveFloat | None = None
    """Scale gradients down to at most this norm."""


class ViewsConfig(Section):
    """The random views of an image. A probability or range of 0 disables a transformation."""

    count: Annotated[int, Field(ge=2, le=16)] = 2
    """Views of each image in a step. The loss is the mean over all pairs of views."""

    crop: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.2, 1.0)
    """Smallest and largest fraction of the area that a random resized crop keeps."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    rotate: NonNegativeFloat = 0.0
    """Degrees to either side."""
    translate: Fraction = 0.0
    """Largest shift in either direction, as a fraction of the side."""
    shear: NonNegativeFloat = 0.0
    """Degrees to either side."""
    jitter: Fraction = 0.8
    """Probability that brightness, contrast, saturation and hue are changed."""
    brightness: Fraction = 0.8
    """Largest relative change of the brightness."""
    contrast: Fraction = 0.8
    """Largest relative change of the contrast."""
    saturation: Fraction = 0.8
    """Largest relative change of the saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.2
    """Largest shift of the hue, as a fraction of the colour circle."""
    grayscale: Fraction = 0.2
    """Probability that a view loses its colour."""
    blur: Fraction = 0.0
    """Probability of a Gaussian blur."""
    solarize: Fraction = 0.0
    """Probability that bright pixels are inverted."""
    function: Annotated[str, named_code()] | None = None
    """Your own views instead, as `package.module:callable`: (batch, generator) -> batch."""


class AlignmentConfig(Section):
    """The term mu * distance(K_k, K_mean) and its variants. See docs/algorithm.md."""

    mu: NonNegativeFloat = 4.0
    """Weight of the alignment term; 0 switches it off."""
    ramp_rounds: NonNegativeInt = 0
    """Rounds over which mu grows linearly from 0 to its value; 0 for a constant mu."""
    layer: Layer = "encoder"
    """The network whose output is the representation. The paper uses the predictor."""
    live_layer: Layer | None = None
    """The network whose output is compared with the consensus during training; by default `layer`. With "projector",
    the term uses the same head as the local loss, and the encoder is free in how it represents the result."""
    distance: Literal["cka", "literal-cka", "relational-kl"] = "cka"
    """`cka`: 1 - CKA. `literal-cka`: CKA itself, as printed in the paper's formula, which pushes clients apart.
    `relational-kl`: the KL divergence between softmax similarities."""
    when: Literal["step", "epoch"] = "step"
    """Add the term at every step, or once per local epoch as in Algorithm 1."""
    every: PositiveInt = 1
    """Add the term only at every n-th step, with n times the weight. The term costs as much as a view."""
    estimator: Literal["biased", "debiased"] = "biased"
    """Estimator of CKA. The debiased one is near 0 for unrelated features of any width."""
    kernel: Annotated[str, named_code("linear", "rbf", "polynomial")] = "linear"
    """The kernel. Or your own, as `package.module:callable`: (a, b) -> K between all rows of a and b."""
    bandwidth: PositiveFloat = 1.0
    """RBF: the bandwidth, in units of the root mean squared distance between rows."""
    degree: PositiveInt = 2
    """Polynomial: (a.b / mean squared norm + 1) ** degree."""
    temperature: PositiveFloat = 0.1
    """`relational-kl`: the temperature of the softmax over similarities."""
    consensus_temperature: PositiveFloat | None = None
    """`relational-kl`: the temperature for the consensus; by default `temperature`. A lower one asks only for the
    nearest neighbours of each image."""
    center: bool = True
    """Centre the kernels, as the name CKA says; the paper's formula does not."""
    normalize: bool = True
    """Scale each client's kernel to Frobenius norm 1 before averaging."""
    row_normalize: bool = True
    """Scale each image's representation to length 1 first, so that no image dominates."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Raise the singular values of a client's representations to this power. Below 1, the effective rank increases."""
    rad_batch: NonNegativeInt = 128
    """RAD images per step; 0 for the whole RAD."""
    memory: NonNegativeInt = 0
    """Number of recent RAD representations, kept without gradient, that are added to each step's comparison."""
    augment_rad: bool = True
    """Train on random views of the RAD images. The consensus is always computed from the original images."""
    leave_one_out: bool = False
    """Exclude the client's own kernel from the mean that it is aligned with."""
    form: Literal["factor", "sketch"] = "factor"
    """What a client sends: a factor of its kernel, as wide as its representation; or a sketch, which has the same shape
    for all clients and of which the server needs only the sum."""
    rank: PositiveInt = 512
    """Columns of the consensus factor that are sent; the smallest directions beyond it are cut off. A sketch has this
    many columns, or one per RAD image if there are fewer, in which case it is lossless."""
    wire: Literal["float32", "float16"] = "float32"
    """Number format of what is sent."""

    @property
    def trained_layer(self) -> Layer:
        """The layer that the term changes."""
        return self.live_layer or self.layer

    @model_validator(mode="after")
    def _sketch_fits_the_wire(self) -> "AlignmentConfig":
        if self.form == "sketch" and self.wire == "float16" and not self.normalize:
            raise ValueError(
                "asks for sketches in float16 of kernels without a common scale, which can overflow; "
                "expected normalize = true or wire = 'float32'"
            )
        return self


class AveragingConfig(Section):
    """Settings of FedU and FedEMA. The defaults follow their published code."""

    threshold: PositiveFloat = 0.4
    """FedU: a client whose encoder diverges less than this takes the global predictor (0.4 CIFAR-10, 0.6 CIFAR-100)."""
    tau: Fraction = 0.7
    """FedEMA: the fraction of its own networks that a client keeps at the divergence of its first round."""
    norm: Literal["layer-mean", "euclidean"] = "layer-mean"
    """The mean over the encoder's convolutions, or the norm over all parameters of encoder and projector."""
    divergence: Literal["training", "global"] = "training"
    """Compare the encoder before and after the client's last training (published code), or the global with the local
    encoder (text of the papers)."""


class EvaluationConfig(Section):
    every: NonNegativeInt = 0
    """Rounds between two probes on the validation images (also before the first round); 0 for never."""
    probes: tuple[Literal["linear", "knn"], ...] = ("linear", "knn")
    """Classifiers on the frozen encoder: a linear one, and nearest neighbours."""
    labels_per_class: PositiveInt | None = None
    """Labels per class that the probe may use; by default the labels of all clients' training images."""
    epochs: PositiveInt = 100
    """Epochs of the linear probe."""
    lr: PositiveFloat = 0.003
    """Learning rate of the linear probe (Adam)."""
    batch: PositiveInt = 512
    """Images per step of the linear probe."""
    standardize: bool = True
    """Standardize each feature to mean 0 and deviation 1, so that encoders of different scales compare fairly."""
    hidden: NonNegativeInt = 0
    """Width of a hidden layer in the probe; 0 for a linear one."""
    neighbours: PositiveInt = 20
    """Neighbours that vote in the probe `knn`."""
    label_shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    """At the end, also probe with these fractions of the labels (0.01, 0.1), frozen and fine-tuned."""
    finetune_epochs: PositiveInt = 30
    """Epochs of fine-tuning the whole encoder, for `label_shares`."""
    finetune_lr: PositiveFloat = 1e-3
    """Learning rate of that fine-tuning."""
    untrained: bool = True
    """At the end, also probe the untrained encoders, as a baseline."""


class EngineConfig(Section):
    kind: Literal["in-process", "simulation"] = "in-process"
    """Worker processes of this machine, or Flower's Simulation Engine (Ray; `pip install hetero-ssfl[simulation]`)."""
    workers: NonNegativeInt = 0
    """Worker processes; 0 for one per core, or a single one on an accelerator."""
    threads: PositiveInt = 1
    """Torch threads per worker. The number affects the last bits of the results."""
    device: str = "cpu"
    """Where to train: `cpu`, `cuda:0`, ..."""
    precision: Precision = "float32"
    """Precision of training: float32, or mixed precision with torch's autocast (float16 with a gradient scaler)."""
    cpus_per_client: PositiveFloat = 1.0
    """Simulation Engine: cores reserved for a client while it trains."""
    gpus_per_client: NonNegativeFloat = 0.0
    """Simulation Engine: fraction of a GPU reserved for a client while it trains."""
    memory_mb: PositiveInt = 4096
    """Budget for clients (networks, images) in each worker's memory, on the accelerator if there is one. Idle clients
    beyond it are kept on disk; images that do not fit on the accelerator are copied batch by batch."""
    round_timeout: PositiveFloat = 3600.0 * 12
    """Seconds after which a round continues without the missing replies of nodes; a run on one machine stops."""
    min_replies: PositiveInt = 1
    """The run ends if a round gets fewer usable replies than this. It can be resumed. On one machine, only clients
    whose loss diverged or whose reply was refused may be missing."""
    join_timeout: PositiveFloat = 120.0
    """Seconds that a new node has to report its name, and that a resumed run waits for known nodes."""
    message_mb: PositiveInt = 1024
    """Largest size of a message; larger messages are refused."""


class PrivacyConfig(Section):
    """What the server may learn about a client. See docs/privacy.md."""

    secure: bool = False
    """Hide each client's contribution and figures: the server learns only their sums over the clients of a round."""
    threshold: Annotated[float, Field(ge=0.5, lt=1)] = 2 / 3
    """Secure sums: more than this fraction of a round's clients must answer; otherwise the round is given up."""
    keep: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Secure sums: the fraction of the last consensus that stays in the next one. The server cannot keep contributions
    of clients that do not take part in a round."""
    largest_entry: PositiveFloat = 16.0
    """Secure sums: entries of a sketch are clipped to this size before they become integers. Typical are values near
    1."""
    epsilon: PositiveFloat | None = None
    """Add noise, so that all rounds together are (epsilon, delta)-differentially private for each client. Figures are
    then not sent. Without `secure` each client adds as much noise as its own sketch needs, and trusts nobody."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The probability with which the guarantee of `epsilon` may fail; well below 1 / the number of clients."""
    clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Noise: a client scales its sketch down to the sketch of a kernel of this norm."""


class TrackingConfig(Section):
    """Output for other tools."""

    tensorboard: bool = False
    """Also write all figures to RUN/tensorboard (`pip install hetero-ssfl[tensorboard]`)."""


class Config(Section):
    name: str = "run"
    """What the run is called in tables and reports."""
    seed: NonNegativeInt = 0
    """Seed of all random choices: data split, weights, views, selection of clients."""
    method: str = "hetero-ssfl"
    """`hetero-ssfl`, `local`, `fedssl`, `fedbyol`, `fedsimsiam`, `fedu`, `fedema`, `fedavg`, or
    `package.module:callable`."""
    rounds: PositiveInt = 10
    """Rounds of the run."""
    local_epochs: PositiveInt = 5
    """Passes of a client over its own images in each round."""
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    rad: RadConfig = RadConfig()
    clients: ClientsConfig = ClientsConfig()
    ssl: SslConfig = SslConfig()
    optim: OptimConfig = OptimConfig()
    views: ViewsConfig = ViewsConfig()
    alignment: AlignmentConfig = AlignmentConfig()
    averaging: AveragingConfig = AveragingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = EngineConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        clients, alignment = self.clients, self.alignment
        if isinstance(clients.per_round, int) and clients.per_round > clients.count:
            raise ValueError(
                f"clients.per_round = {clients.per_round} exceeds clients.count = {clients.count}. "
                f"Select at most {clients.count}."
            )
        if isinstance(clients.weights, tuple) and len(clients.weights) != clients.count:
            raise ValueError(
                f"clients.weights has {len(clients.weights)} values, expected one for each of "
                f"{clients.count} clients. Add or remove values, or use 'uniform'."
            )
        if self.views.crop[0] > self.views.crop[1]:
            raise ValueError(
                f"views.crop = {list(self.views.crop)} is in the wrong order, expected the smaller value first. "
                "Swap the two."
            )
        if 0 < alignment.rad_batch < 4 or self.rad.size < 4:
            raise ValueError(
                f"a kernel of {min(alignment.rad_batch or self.rad.size, self.rad.size)} RAD images is too small, "
                "expected at least 4. Raise alignment.rad_batch and rad.size, or set alignment.rad_batch = 0 for all."
            )
        if self.engine.min_replies > clients.selected_per_round():
            raise ValueError(
                f"engine.min_replies = {self.engine.min_replies} can never be met with "
                f"{clients.selected_per_round()} clients per round. Lower it."
            )
        return self

    @model_validator(mode="after")
    def _noise_is_possible(self) -> "Config":
        """Refuse settings for which a bounded sketch is not all that a client sends."""
        epsilon, alignment, weights = self.privacy.epsilon, self.alignment, self.clients.weights
        if epsilon is None:
            return self
        for found, wanted, reason in (
            (f"alignment.form = '{alignment.form}'", alignment.form == "sketch", "noise is added to sketches"),
            ("alignment.normalize = false", alignment.normalize, "a kernel needs a bound on its norm"),
            (f"clients.weights = {weights!r}", weights == "uniform", "sizes would need noise, too"),
        ):
            if not wanted:
                raise ValueError(
                    f"privacy.epsilon = {epsilon:g} does not allow {found}: {reason}. Change it, or leave "
                    "privacy.epsilon out."
                )
        return self

    @model_validator(mode="after")
    def _secure_sums_are_possible(self) -> "Config":
        """Refuse settings that need what only a single contribution tells."""
        clients, alignment = self.clients, self.alignment
        if not self.privacy.secure:
            return self
        for found, wanted, reason in (
            (f"alignment.form = '{alignment.form}'", alignment.form == "sketch", "only sketches can be summed"),
            ("alignment.leave_one_out = true", not alignment.leave_one_out, "the server knows no single kernel"),
            ("alignment.normalize = false", alignment.normalize, "integers need a common scale"),
            (
                f"clients.weights = {clients.weights}",
                isinstance(clients.weights, str),
                "weights that the server chooses could single out a client",
            ),
            (
                f"{clients.selected_per_round()} clients per round",
                clients.selected_per_round() >= 3,
                "a sum of fewer than three reveals too much",
            ),
        ):
            if not wanted:
                raise ValueError(
                    f"privacy.secure = true does not allow {found}: {reason}. Change it, or set privacy.secure = false."
                )
        return self

    @property
    def own_code(self) -> dict[str, str]:
        """The user's own code that training imports, by setting; encoders belong to the clients and are not part."""
        named = {
            "method": self.method,
            "ssl.kind": self.ssl.kind,
            "optim.kind": self.optim.kind,
            "views.function": self.views.function or "",
            "alignment.kernel": self.alignment.kernel,
        }
        return {setting: spec for setting, spec in named.items() if ":" in spec}

    def model_of(self, client: int) -> ModelConfig:
        """Return the model of client number `client`, with the defaults of `[ssl]` filled in."""
        model = self.clients.models[client % len(self.clients.models)]
        return ModelConfig(
            encoder=model.encoder,
            projector=model.projector or self.ssl.projector,
            predictor=model.predictor or self.ssl.predictor,
            gpu_fraction=model.gpu_fraction,
        )

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

"""One frozen, validated description of a run. Every choice the paper leaves open is a value here."""

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

Share = Annotated[float, Field(ge=0, le=1)]
Layer = Literal["encoder", "projector", "predictor"]
Precision = Literal["float32", "bfloat16", "float16"]


def named_code(*known: str) -> AfterValidator:
    """One of the known names, or the user's own callable by name."""

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
    side: PositiveInt | None = None
    """Resize (and centre-crop) every image to this many pixels; required for images of mixed sizes."""
    channels: Literal[1, 3] | None = None
    """Grey or colour; by default what the first image has."""
    limit: PositiveInt | None = None
    """Use only this many training images, balanced over the classes and chosen by the seed."""
    validation: NonNegativeInt = 200
    """Training images kept apart for choosing settings: nobody trains on them. None where there are no labels."""
    on_bad_image: Literal["error", "skip"] = "error"
    image_column: str | None = None
    label_column: str | None = None


class PartitionConfig(Section):
    kind: Literal["iid", "classes", "dirichlet", "shards"] = "classes"
    classes_per_client: PositiveInt | None = None
    """For `classes`: by default all classes divided by the clients (at least 1)."""
    alpha: PositiveFloat = 0.5
    """For `dirichlet`: the smaller, the more unequal."""
    shards_per_client: PositiveInt = 2


class RadConfig(Section):
    """The Representation Alignment Dataset: unlabeled images that every participant has."""

    size: PositiveInt = 300
    source: str | None = None
    """Another data set to take it from; by default training images kept apart from all clients."""
    in_ssl: bool = False
    """Also train the local self-supervised loss on the RAD images."""


class ModelConfig(Section):
    encoder: str
    """A name with options, such as `resnet10(width=16)`, `timm:NAME` or `package.module:callable`."""
    projector: tuple[PositiveInt, PositiveInt] | None = None
    """(hidden, output) widths; by default those of `[ssl]`."""
    predictor: PositiveInt | None = None
    """Hidden width; by default that of `[ssl]`."""
    gpu_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the GPU's memory, for a client at work with this model; by default an equal part for each worker process."""


def as_model(value: Any) -> Any:
    return {"encoder": value} if isinstance(value, str) else value


class ClientsConfig(Section):
    count: PositiveInt = 5
    per_round: PositiveInt | Annotated[float, Field(gt=0, le=1)] = 1.0
    """How many take part in a round: a whole number counts them, a fraction is a share of all."""
    models: tuple[Annotated[ModelConfig, BeforeValidator(as_model)], ...] = Field(
        default=(ModelConfig(encoder="resnet10(width=16)"),), min_length=1
    )
    """Client k uses entry k modulo the length of the list."""
    weights: Literal["uniform", "size"] | tuple[PositiveFloat, ...] = "uniform"
    """w_j of the consensus: equal, by number of images, or given one by one."""

    def selected_per_round(self, present: int | None = None) -> int:
        """Of all clients, or of those present."""
        of = self.count if present is None else present
        return min(self.per_round, of) if isinstance(self.per_round, int) else max(1, round(self.per_round * of))


class SslConfig(Section):
    kind: Annotated[str, named_code("byol", "simsiam", "vicreg", "simclr", "barlow-twins")] = "byol"
    """The local loss; or your own, as `package.module:callable`: (learner, views) -> (loss, projections)."""
    projector: tuple[PositiveInt, PositiveInt] = (256, 128)
    predictor: PositiveInt = 256
    normalize: bool = True
    """BYOL's own loss, squared error of unit vectors; false for the paper's squared error of raw outputs."""
    ema: Share = 0.99
    """The share of the old target network kept at each step (BYOL)."""
    ema_end: Share | None = None
    """What `ema` becomes by the end of the run, along a cosine; by default it stays (BYOL's authors: 1)."""
    temperature: PositiveFloat = 0.5
    """Of SimCLR's softmax."""
    invariance: NonNegativeFloat = 25.0
    """VICReg: the weight of the distance between views."""
    variance: NonNegativeFloat = 25.0
    """VICReg: the weight of a standard deviation below 1 in any dimension."""
    covariance: NonNegativeFloat = 1.0
    """VICReg: the weight of covariances between dimensions."""
    redundancy: NonNegativeFloat = 0.005
    """Barlow Twins: the weight of correlations between dimensions."""


class OptimConfig(Section):
    kind: Annotated[str, named_code("sgd", "adamw", "lars")] = "sgd"
    """Or your own, as `package.module:callable`: (parameters, lr) -> torch.optim.Optimizer."""
    lr: PositiveFloat = 0.032
    momentum: Share = 0.9
    """Of SGD and LARS."""
    weight_decay: NonNegativeFloat = 5e-4
    batch: Annotated[int, Field(ge=2)] = 128
    schedule: Literal["cosine", "constant"] = "cosine"
    """Cosine decay runs once over the whole run, not once per round."""
    warmup: NonNegativeFloat = 0.0
    """Rounds over which the learning rate rises linearly from 0 (0.5 is half a round)."""
    clip_norm: PositiveFloat | None = None


class ViewsConfig(Section):
    """How random views of an image differ. A probability or range of 0 turns a change off."""

    count: Annotated[int, Field(ge=2, le=16)] = 2
    """Views of each image in a step. The loss is a mean over all pairs of them."""

    crop: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.2, 1.0)
    """Least and greatest share of the area that a random resized crop keeps."""
    flip: Share = 0.5
    rotate: NonNegativeFloat = 0.0
    """Degrees to either side."""
    translate: Share = 0.0
    """Share of the side, in either direction."""
    shear: NonNegativeFloat = 0.0
    """Degrees to either side."""
    jitter: Share = 0.8
    brightness: Share = 0.8
    contrast: Share = 0.8
    saturation: Share = 0.8
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.2
    grayscale: Share = 0.2
    blur: Share = 0.0
    solarize: Share = 0.0
    function: Annotated[str, named_code()] | None = None
    """Your own views instead, as `package.module:callable`: (batch, generator) -> batch."""


class AlignmentConfig(Section):
    """The term mu * distance(K_k, K_mean) and every reading of it. See docs/alignment.md."""

    mu: NonNegativeFloat = 4.0
    ramp_rounds: NonNegativeInt = 0
    """Rounds over which mu grows linearly from 0 to its value; 0 for a constant mu."""
    layer: Layer = "encoder"
    """Whose output is the representation: the paper says the predictor's."""
    distance: Literal["cka", "literal-cka", "relational-kl"] = "cka"
    """1 - CKA; CKA itself, as the paper's formula prints it (and so pushes clients apart); or softmax similarities."""
    when: Literal["step", "epoch"] = "step"
    """Add the term at every step, or once per local epoch as in Algorithm 1."""
    every: PositiveInt = 1
    """Steps from one term to the next, each then weighted that much more: the term costs as much as a view."""
    estimator: Literal["biased", "debiased"] = "biased"
    """Of CKA; the debiased one is near 0 for unrelated features, whatever their width."""
    kernel: Annotated[str, named_code("linear", "rbf", "polynomial")] = "linear"
    """Or your own, as `package.module:callable`: (a, b) -> K between all rows of a and b."""
    bandwidth: PositiveFloat = 1.0
    """RBF: in units of the root mean squared distance between rows."""
    degree: PositiveInt = 2
    """Polynomial: (a.b / mean squared norm + 1) ** degree."""
    temperature: PositiveFloat = 0.1
    """Of the softmax over similarities (`relational-kl`)."""
    center: bool = True
    normalize: bool = True
    """Scale each client's kernel to Frobenius norm 1 before averaging."""
    row_normalize: bool = True
    """Scale each image's representation to length 1 first, so that no image dominates."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Singular values of a client's representations to this power: below 1 raises the effective rank."""
    rad_batch: NonNegativeInt = 128
    """RAD images per step; 0 is the whole RAD."""
    memory: NonNegativeInt = 0
    """Recent RAD representations, kept without gradient, that join each step's comparison."""
    augment_rad: bool = True
    """Show the client views of the RAD images; the consensus always comes from clean ones."""
    leave_one_out: bool = False
    """Leave the client's own kernel out of the mean it is aligned with."""
    form: Literal["factor", "sketch"] = "factor"
    """What a client sends: a factor of its kernel, as wide as its representation; or a sketch of one shape for all
    clients, of which the server needs only the sum."""
    rank: PositiveInt = 512
    """Columns of the consensus factor that travel; beyond it the smallest directions are cut. A sketch has exactly this
    many columns, or one per RAD image if those are fewer, and with that many it loses nothing."""
    wire: Literal["float32", "float16"] = "float32"

    @model_validator(mode="after")
    def _sketch_fits_the_wire(self) -> "AlignmentConfig":
        if self.form == "sketch" and self.wire == "float16" and not self.normalize:
            raise ValueError(
                "asks for sketches in float16 of kernels without a common scale, which can overflow; "
                "expected normalize = true or wire = 'float32'"
            )
        return self


class AveragingConfig(Section):
    """What FedU and FedEMA add to averaging. Both compare online encoders, projectors included."""

    threshold: PositiveFloat = 0.4
    """FedU: a client whose encoder diverges less takes the global predictor (0.4 CIFAR-10, 0.6 CIFAR-100)."""
    tau: Share = 0.7
    """FedEMA: the share of its own networks a client keeps at the divergence of its first round."""
    norm: Literal["euclidean", "layer-mean"] = "euclidean"
    """Of the difference of all parameters, or averaged over layers as in FedU's and FedEMA's published code."""
    divergence: Literal["global", "training"] = "global"
    """Global against local encoder (the papers), or before against after the last training (published code)."""


class EvaluationConfig(Section):
    every: NonNegativeInt = 0
    """Probe on the validation images every so many rounds (also before the first); 0 for never."""
    probes: tuple[Literal["linear", "knn"], ...] = ("linear", "knn")
    labels_per_class: PositiveInt | None = None
    """Labels the probe may use; by default those of all clients' training images."""
    epochs: PositiveInt = 100
    lr: PositiveFloat = 0.003
    batch: PositiveInt = 512
    standardize: bool = True
    """Give each feature mean 0 and deviation 1 first, so that encoders of other scales compare fairly."""
    hidden: NonNegativeInt = 0
    """Width of a hidden layer in the probe; 0 for a linear one."""
    neighbours: PositiveInt = 20
    label_shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    """At the end also probe with these shares of the labels (0.01, 0.1), frozen and fine-tuned."""
    finetune_epochs: PositiveInt = 30
    finetune_lr: PositiveFloat = 1e-3
    untrained: bool = True
    """At the end also probe the untrained encoders, as a floor."""


class EngineConfig(Section):
    kind: Literal["in-process", "simulation"] = "in-process"
    """Worker processes of this machine, or Flower's Simulation Engine (Ray; `pip install hetero-ssfl[simulation]`)."""
    workers: NonNegativeInt = 0
    """Worker processes; 0 for one per core, or a single one on an accelerator."""
    threads: PositiveInt = 1
    """Torch threads per worker. Other values change the last bits of the results."""
    device: str = "cpu"
    precision: Precision = "float32"
    """Of training: float32, or mixed precision with torch's autocast (float16 with a gradient scaler)."""
    cpus_per_client: PositiveFloat = 1.0
    """Simulation Engine: cores that a client at work holds."""
    gpus_per_client: NonNegativeFloat = 0.0
    """Simulation Engine: share of a GPU that a client at work holds."""
    memory_mb: PositiveInt = 4096
    """Budget for clients (networks, images) kept in each worker's memory, on the accelerator if there is one. Idle
    clients beyond it wait on disk; images that do not fit on the accelerator are copied batch by batch."""
    round_timeout: PositiveFloat = 3600.0 * 12
    """Seconds after which a round goes on without the replies that are still missing."""
    min_replies: PositiveInt = 1
    """Fewer good replies than this end the run (it can be resumed)."""
    join_timeout: PositiveFloat = 120.0
    """Seconds that a new node has to say its name, and that a resumed run waits for nodes it knew."""
    message_mb: PositiveInt = 1024
    """Messages beyond this size are refused."""


class TrackingConfig(Section):
    """Other programs that look on."""

    tensorboard: bool = False
    """Also write all figures to RUN/tensorboard (`pip install hetero-ssfl[tensorboard]`)."""


class Config(Section):
    name: str = "run"
    seed: NonNegativeInt = 0
    method: str = "hetero-ssfl"
    rounds: PositiveInt = 10
    local_epochs: PositiveInt = 5
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
                f"{clients.count} clients. Add or remove values, or say 'uniform'."
            )
        if self.views.crop[0] > self.views.crop[1]:
            raise ValueError(
                f"views.crop = {list(self.views.crop)} runs backwards, expected least before greatest. Swap the two."
            )
        if 0 < alignment.rad_batch < 4 or self.rad.size < 4:
            raise ValueError(
                f"a kernel of {min(alignment.rad_batch or self.rad.size, self.rad.size)} RAD images says nothing, "
                "expected at least 4. Raise alignment.rad_batch and rad.size, or set alignment.rad_batch = 0 for all."
            )
        if self.engine.min_replies > clients.selected_per_round():
            raise ValueError(
                f"engine.min_replies = {self.engine.min_replies} can never be met with "
                f"{clients.selected_per_round()} clients per round. Lower it."
            )
        return self

    def model_of(self, client: int) -> ModelConfig:
        """The model of client number `client`, with the defaults of `[ssl]` filled in."""
        model = self.clients.models[client % len(self.clients.models)]
        return ModelConfig(
            encoder=model.encoder,
            projector=model.projector or self.ssl.projector,
            predictor=model.predictor or self.ssl.predictor,
            gpu_fraction=model.gpu_fraction,
        )

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

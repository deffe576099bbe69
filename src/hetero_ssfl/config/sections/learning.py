"""Sections about training and probing the networks of a client."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .base import Fraction, Layer, NamedCode, Section


class ModelConfig(Section):
    encoder: str
    """A name with options, such as `resnet10(width=16)`, `timm:NAME` or `package.module:callable`."""
    projector: tuple[PositiveInt, PositiveInt] | None = None
    """(hidden, output) widths; by default as in `[ssl]`."""
    predictor: PositiveInt | None = None
    """Hidden width; by default as in `[ssl]`."""
    gpu_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of the GPU's memory for a client that trains this model; by default 1 / the number of workers."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return {"encoder": given} if isinstance(given, str) else given


class SslConfig(Section):
    kind: Annotated[str, NamedCode("byol", "simsiam", "vicreg", "simclr", "barlow-twins")] = "simclr"
    """The local loss; by default what the method is defined with, such as `byol` for `fedbyol`. Or your own, as
    `package.module:callable`: (learner, views) -> (loss, projections)."""
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
    temperature: PositiveFloat = 0.15
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
    kind: Annotated[str, NamedCode("sgd", "adamw", "lars", "muon")] = "muon"
    """The optimiser. Or your own, as `package.module:callable`: (parameters, lr) -> torch.optim.Optimizer."""
    lr: PositiveFloat = 0.005
    """Learning rate, before schedule and warm-up."""
    momentum: Fraction = 0.95
    """Momentum of SGD, LARS and Muon."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay."""
    batch: Annotated[int, Field(ge=2)] = 128
    """Images per step."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The cosine decay covers the whole run, not each round."""
    warmup: NonNegativeFloat = 0.2
    """Rounds over which the learning rate rises linearly from 0 (0.5 is half a round)."""
    clip_norm: PositiveFloat | None = None
    """Scale gradients down to at most this norm."""


class AlignmentConfig(Section):
    """The term mu * distance(K_k, K_mean) and its variants. See docs/algorithm.md."""

    mu: NonNegativeFloat = 1.0
    """Weight of the alignment term; 0 switches it off."""
    ramp_rounds: NonNegativeInt = 0
    """Rounds over which mu grows linearly from 0 to its value; 0 for a constant mu."""
    layer: Layer = "encoder"
    """The network whose output is the representation. The paper uses the predictor."""
    live_layer: Layer | None = None
    """The network whose output is compared with the consensus during training; by default `layer`. With "projector",
    the term uses the same head as the local loss, and the encoder is free in how it represents the result."""
    distance: Literal["cka", "literal-cka", "relational-kl", "coordinates"] = "coordinates"
    """`cka`: 1 - CKA. `literal-cka`: CKA itself, as printed in the paper's formula, which pushes clients apart.
    `relational-kl`: the KL divergence between softmax similarities. `coordinates`: a head on the encoder predicts where
    an image lies in the mean kernel; with `rad.in_ssl` this needs no additional forward pass. `when`, `every`,
    `memory`, `augment_rad` and `live_layer` do not apply to it, nor does `rad_batch` with `rad.in_ssl`."""
    coordinates: PositiveInt = 128
    """`coordinates`: their number, which is the width of the vectors that all clients share."""
    coordinates_power: Annotated[float, Field(ge=0, le=1)] = 0.25
    """`coordinates`: raise the singular values of the mean kernel's factor to this power."""
    when: Literal["step", "epoch"] = "step"
    """Add the term at every step, or once per local epoch as in Algorithm 1."""
    every: PositiveInt = 1
    """Add the term only at every n-th step, with n times the weight. The term costs as much as a view."""
    estimator: Literal["biased", "debiased"] = "biased"
    """Estimator of CKA. The debiased one is near 0 for unrelated features of any width."""
    own_images: NonNegativeFloat = 1.0
    """`coordinates`: weight of the term on own images, whose two views must lie at the same place; 0 for none."""
    kernel: Annotated[str, NamedCode("linear", "rbf", "polynomial")] = "linear"
    """The kernel. Or your own, as `package.module:callable`: (a, b) -> K between all rows of a and b."""
    bandwidth: PositiveFloat = 1.0
    """RBF: the bandwidth, in units of the root mean squared distance between rows."""
    degree: PositiveInt = 2
    """Polynomial: (a.b / mean squared norm + 1) ** degree."""
    temperature: PositiveFloat = 0.1
    """`coordinates`, `relational-kl`: the temperature of the softmax over similarities."""
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
    """RAD images per step that the term compares; 0 for the whole RAD. Coordinates with `rad.in_ssl` take those of the
    step's batch instead."""
    memory: NonNegativeInt = 0
    """Number of recent RAD representations, kept without gradient, that are added to each step's comparison."""
    ten_crop: bool = True
    """Average a client's representation of a RAD image over the image, its corners if random views crop, and the
    mirror images of all these if they flip."""
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
    def _possible(self) -> "AlignmentConfig":
        if self.form == "sketch" and self.wire == "float16" and not self.normalize:
            what = "asks for sketches in float16 of kernels without a common scale, which can overflow"
            raise ValueError(f"{what}; expected normalize = true or wire = 'float32'")
        if self.distance == "coordinates" and self.leave_one_out:
            what = "asks for coordinates without a client's own kernel (leave_one_out), but all clients have the same"
            raise ValueError(f"{what} coordinates; expected leave_one_out = false or another distance")
        return self


class AveragingConfig(Section):
    """Settings of methods that average weights. Those of FedU and FedEMA follow their published code."""

    trim: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Leave this fraction of the replies out at both ends, for each weight separately, and average the others equally:
    0.2 withstands a liar in five clients, 0.5 is the median. 0: the mean by number of images, of all replies."""
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
    probes: tuple[Literal["linear", "knn", "knn-flat"], ...] = ("linear", "knn")
    """Classifiers on the frozen encoder: a linear one, nearest neighbours, and nearest neighbours after the features'
    spectrum is flattened, which shows how much of a gain of `knn` is only a rescaling of features."""
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
    common_space: bool = False
    """With `alignment.distance = "coordinates"`, also probe what the head predicts, the vectors of the space that all
    clients share: `linear_common`, `knn_common`."""
    floors: bool = True
    """Also probe raw pixels and untrained convolutions: an encoder that does not beat them has learned little."""

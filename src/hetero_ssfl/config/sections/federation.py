"""Sections about who takes part, where training runs, and what others may learn."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Precision, Section
from .learning import ModelConfig


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
    models: tuple[ModelConfig, ...] = Field(default=(ModelConfig(encoder="resnet10(width=16)"),), min_length=1)
    """Client k uses entry k modulo the length of the list."""
    weights: Literal["uniform", "size", "agreement"] | tuple[PositiveFloat, ...] = "uniform"
    """Weights w_j of the consensus: equal, by number of images, learned from how much a client's kernel agrees with
    those of the others, or one value per client."""
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


class EngineConfig(Section):
    kind: Literal["in-process", "simulation"] = "in-process"
    """Worker processes of this machine, or Flower's Simulation Engine (Ray; extra `simulation`)."""
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
    threshold: Annotated[float, Field(ge=0.6, lt=1)] = 2 / 3
    """Secure sums: more than this fraction of a round's clients must answer; otherwise the round is given up. A value t
    protects against a server that lies with the help of a fraction 2t - 1 of the clients: a third by default."""
    groups: PositiveInt = 1
    """Secure sums: divide the clients of a round into this many groups with a sum each. The consensus is the geometric
    median of their means, so that one liar spoils one group only. The server learns the sum of each group."""
    keep: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Secure sums: the fraction of the last consensus that stays in the next one. The server cannot keep contributions
    of clients that do not take part in a round."""
    largest_entry: PositiveFloat = 16.0
    """Secure sums: entries of a sketch, typically near 1, are clipped to this size before they become integers."""
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
    """Also write all figures to RUN/tensorboard (extra `tensorboard`)."""
    mlflow: str | None = None
    """Also send them to MLflow: a database, such as `sqlite:///mlflow.db`, or the address of its server (extra
    `mlflow`)."""
    wandb: str | None = None
    """Also write them to a project of Weights & Biases in RUN/wandb, without a network unless the environment variable
    WANDB_MODE is `online` (extra `wandb`)."""
    own: str | None = None
    """Your own tracker, `package.module:Class`: it gets the run folder, and its method `event` hears every event."""


class WatchConfig(Section):
    """The live page of a run. It is not sent to nodes."""

    address: str | None = None
    """Where the server shows a live page while the run goes on, as HOST:PORT: `127.0.0.1:8765`. Any host that is not
    local needs a token, which the server prints."""

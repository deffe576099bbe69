"""The frozen, validated config of a run. Every choice that the paper leaves open is a setting here."""

import tomli_w
from pydantic import NonNegativeInt, PositiveInt, model_validator

from .sections.base import Section
from .sections.data import DataConfig, PartitionConfig, RadConfig, ViewsConfig
from .sections.federation import ClientsConfig, EngineConfig, PrivacyConfig, TrackingConfig
from .sections.learning import AlignmentConfig, AveragingConfig, EvaluationConfig, ModelConfig, OptimConfig, SslConfig


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
        _refuse_conflicts(
            f"privacy.epsilon = {epsilon:g}",
            "leave privacy.epsilon out",
            (f"alignment.form = '{alignment.form}'", alignment.form == "sketch", "noise is added to sketches"),
            ("alignment.normalize = false", alignment.normalize, "a kernel needs a bound on its norm"),
            (f"clients.weights = {weights!r}", weights == "uniform", "sizes would need noise, too"),
        )
        return self

    @model_validator(mode="after")
    def _secure_sums_are_possible(self) -> "Config":
        """Refuse settings that need what only a single contribution tells."""
        clients, alignment = self.clients, self.alignment
        if not self.privacy.secure:
            return self
        selected = clients.selected_per_round()
        _refuse_conflicts(
            "privacy.secure = true",
            "set privacy.secure = false",
            (f"alignment.form = '{alignment.form}'", alignment.form == "sketch", "only sketches can be summed"),
            ("alignment.leave_one_out = true", not alignment.leave_one_out, "the server knows no single kernel"),
            ("alignment.normalize = false", alignment.normalize, "integers need a common scale"),
            (
                f"clients.weights = {clients.weights}",
                isinstance(clients.weights, str),
                "weights that the server chooses could single out a client",
            ),
            (f"{selected} clients per round", selected >= 3, "a sum of fewer than three reveals too much"),
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


def _refuse_conflicts(asked: str, remedy: str, *conditions: tuple[str, bool, str]) -> None:
    """Raise ValueError for the first (setting, whether it is allowed, why not) that is not allowed."""
    for setting, allowed, reason in conditions:
        if not allowed:
            raise ValueError(f"{asked} does not allow {setting}: {reason}. Change it, or {remedy}.")

"""The frozen, validated config of a run. Every choice that the paper leaves open is a setting here."""

from collections.abc import Iterator
from typing import Any

import tomli_w
from pydantic import NonNegativeInt, PositiveInt, model_validator

from .sections.base import Section
from .sections.data import DataConfig, PartitionConfig, RadConfig, ViewsConfig
from .sections.federation import ClientsConfig, EngineConfig, PrivacyConfig, TrackingConfig, WatchConfig
from .sections.learning import AlignmentConfig, AveragingConfig, EvaluationConfig, ModelConfig, OptimConfig, SslConfig

BYOL = {"ssl": {"kind": "byol"}}
DEFAULTS_OF_METHODS: dict[str, dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("fedbyol", "fedu", "fedema"), BYOL),
    "fedsimsiam": {"ssl": {"kind": "simsiam"}},
    "fedavg": {"rad": {"in_ssl": False}},
}
"""Settings without which a method is not defined, unless the config has others."""


class Config(Section):
    name: str = "run"
    """What the run is called in tables and reports."""
    seed: NonNegativeInt = 0
    """Seed of all random choices: data split, weights, views, selection of clients."""
    method: str = "hetero-ssfl"
    """`hetero-ssfl`, `local`, `fedssl`, `fedbyol`, `fedsimsiam`, `fedu`, `fedema`, `fedavg`, or
    `package.module:callable`."""
    rounds: PositiveInt = 6
    """Rounds of the run."""
    local_epochs: PositiveInt | None = None
    """Passes of a client over its images in each round; by default as many as make about `local_steps` steps."""
    local_steps: PositiveInt = 100
    """Steps of a client in each round, rounded to whole passes over its images, if `local_epochs` is not given."""
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
    watch: WatchConfig = WatchConfig()

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_method(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        defaults = DEFAULTS_OF_METHODS.get(str(given.get("method")), {})
        sections = {name: given.get(name, {}) for name in defaults}
        return {**given, **{name: {**defaults[name], **s} for name, s in sections.items() if isinstance(s, dict)}}

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        problem = next(self._problems(), None)
        if problem:
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong with settings that do not go together."""
        clients, alignment, weights = self.clients, self.alignment, self.clients.weights
        selected, crop = clients.selected_per_round(), list(self.views.crop)
        if isinstance(clients.per_round, int) and clients.per_round > clients.count:
            excess = f"clients.per_round = {clients.per_round} exceeds clients.count = {clients.count}"
            yield f"{excess}. Select at most {clients.count}."
        if isinstance(weights, tuple) and len(weights) != clients.count:
            expected = f"expected one for each of {clients.count} clients"
            yield f"clients.weights has {len(weights)} values, {expected}. Add or remove values, or use 'uniform'."
        if crop[0] > crop[1]:
            yield f"views.crop = {crop} is in the wrong order, expected the smaller value first. Swap the two."
        if (rows := min(alignment.rad_batch or self.rad.size, self.rad.size)) < 4:
            remedy = "Raise alignment.rad_batch and rad.size, or set alignment.rad_batch = 0 for all"
            yield f"a kernel of {rows} RAD images is too small, expected at least 4. {remedy}."
        if self.engine.min_replies > selected:
            needed = f"engine.min_replies = {self.engine.min_replies}"
            yield f"{needed} can never be met with {selected} clients per round. Lower it."
        yield from self._privacy_problems(selected)

    def _privacy_problems(self, selected: int) -> Iterator[str]:
        alignment, weights = self.alignment, self.clients.weights
        sketch = f"alignment.form = '{alignment.form}'", alignment.form == "sketch"
        scaled = "alignment.normalize = false", alignment.normalize
        if weights == "agreement" and not self.privacy.secure:
            yield from _conflicts(
                "clients.weights = 'agreement'",
                "set clients.weights = 'uniform'",
                (sketch[0], not sketch[1], "kernels are compared by their factors"),
            )
        if self.privacy.epsilon is not None:  # a bounded sketch must be all that a client sends
            yield from _conflicts(
                f"privacy.epsilon = {self.privacy.epsilon:g}",
                "leave privacy.epsilon out",
                (*sketch, "noise is added to sketches"),
                (*scaled, "a kernel needs a bound on its norm"),
                (f"clients.weights = {weights!r}", weights == "uniform", "sizes would need noise, too"),
            )
        if self.privacy.secure:  # nothing may be needed that only a single contribution tells
            chosen = "weights that the server chooses could single out a client"
            yield from _conflicts(
                "privacy.secure = true",
                "set privacy.secure = false",
                (*sketch, "only sketches can be summed"),
                ("alignment.leave_one_out = true", not alignment.leave_one_out, "the server knows no single kernel"),
                (*scaled, "integers need a common scale"),
                (f"clients.weights = {weights}", isinstance(weights, str), chosen),
                ("clients.weights = 'agreement'", weights != "agreement", "the server knows no single kernel"),
                (f"{selected} clients per round", selected >= 3, "a sum of fewer than three reveals too much"),
            )
        if (groups := self.privacy.groups) > 1:
            yield from _conflicts(
                f"privacy.groups = {groups}",
                "set privacy.groups = 1",
                ("privacy.secure = false", self.privacy.secure, "there is no sum to divide"),
                ("two groups", groups > 2, "of two, nobody can say which one is spoilt"),
                ("privacy.epsilon", self.privacy.epsilon is None, "each group would need all of the noise"),
                (f"{selected} clients per round", selected >= 3 * groups, "a sum needs three clients"),
                (
                    "clients.per_round below clients.count",
                    selected == self.clients.count,
                    "other groups in each round would tell single contributions",
                ),
                ("clients.newcomers", self.clients.newcomers == 0, "they would change the groups"),
            )

    def epochs_of(self, images: int) -> int:
        """Return the passes of each round over that many images, by default fitted to `local_steps`."""
        return self.local_epochs or max(1, round(self.local_steps / self._steps_per_epoch(images)))

    def steps_of(self, images: int) -> int:
        """Return the steps of each round on that many images."""
        return self.epochs_of(images) * self._steps_per_epoch(images)

    def _steps_per_epoch(self, images: int) -> int:
        return max(1, images // min(self.optim.batch, images))

    @property
    def own_code(self) -> dict[str, str]:
        """The user's own code that training imports, by setting; encoders belong to the clients and are not part."""
        named = {"method": self.method, "ssl.kind": self.ssl.kind, "optim.kind": self.optim.kind}
        named |= {"views.function": self.views.function or "", "alignment.kernel": self.alignment.kernel}
        return {setting: spec for setting, spec in named.items() if ":" in spec}

    def model_of(self, client: int) -> ModelConfig:
        """Return the model of client number `client`, with the defaults of `[ssl]` filled in."""
        model = self.clients.models[client % len(self.clients.models)]
        projector, predictor = model.projector or self.ssl.projector, model.predictor or self.ssl.predictor
        return model.model_copy(update={"projector": projector, "predictor": predictor})

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def _conflicts(asked: str, remedy: str, *conditions: tuple[str, bool, str]) -> Iterator[str]:
    """Yield an error for each (setting, whether it is allowed, why not) that is not allowed."""
    for setting, allowed, reason in conditions:
        if not allowed:
            yield f"{asked} does not allow {setting}: {reason}. Change it, or {remedy}."

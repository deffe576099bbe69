"""What a participant has spent of its privacy, and its own metrics, which a server does not get: both on its disk."""

from collections.abc import Mapping
from pathlib import Path

from ...errors import ProtocolError
from ...methods import method_for
from ...methods.capabilities import Noise
from ...privacy.accountant import epsilon_of
from ...runs.files import read_json, write_json
from ..participants.participant import Participant


class Budget:
    """Count what all contributions of this participant in this federation have cost, as squared mu.

    A repeated round costs again, because its noise is new. The count does not depend on the participant's encoder.
    """

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self.path = participant.states.path.parent / f"privacy-{participant.name}.json"
        content = read_json(self.path) if self.path.exists() else {}
        self.squared_mu = float(content.get("squared_mu", 0.0))
        self.releases = int(content.get("releases", 0))
        """Number of contributions with noise."""

    @property
    def cost(self) -> float:
        """The squared mu of one contribution; 0 without noise."""
        method = method_for(self.participant.config)
        return method.spent(1) if isinstance(method, Noise) else 0.0

    def check(self) -> None:
        """Raise ProtocolError, before any training, if another contribution would exceed the owner's limit."""
        if self.participant.budget is None:
            return
        budget, delta = self.participant.budget
        spent = epsilon_of(self.squared_mu + self.cost, delta)
        if spent > budget:
            raise ProtocolError(
                f"{self.participant.name} has a privacy budget of epsilon = {budget:g}, and this round would raise "
                f"what it has spent to {spent:.3g}. Raise limits.epsilon in the node settings, or end the run."
            )

    def spend(self) -> None:
        """Count one contribution, before it is sent. Whoever calls this holds the participant's lock since `check`."""
        if self.cost:
            self.squared_mu, self.releases = self.squared_mu + self.cost, self.releases + 1
            write_json(self.path, {"squared_mu": self.squared_mu, "releases": self.releases})

    def facts(self) -> dict[str, object]:
        """Return what was spent, for a model card; nothing without noise."""
        privacy = self.participant.config.privacy
        if not self.releases:
            return {}
        return {
            "epsilon": epsilon_of(self.squared_mu, privacy.delta),
            "delta": privacy.delta,
            "clip": privacy.clip,
            "releases": self.releases,
            "secure_sums": privacy.secure,
        }


def keep_metrics(participant: Participant, round_number: int, metrics: Mapping[str, float]) -> None:
    """Add the participant's own metrics of a round to a file on its disk. The server gets means of them, or nothing."""
    path: Path = participant.states.path / "figures.json"
    before = read_json(path) if path.exists() else {}
    write_json(path, {**before, str(round_number): dict(metrics)})

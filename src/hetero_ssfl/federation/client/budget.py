"""What a participant has spent of its privacy, and its own metrics, which a server does not get: both on its disk."""

from collections.abc import Mapping

from ...errors import ProtocolError
from ...methods import method_for
from ...methods.capabilities import Noise
from ...privacy.accountant import epsilon_of
from ...runs.files import read_json, write_json
from ..participants.participant import Participant


class Budget:
    """Count what all contributions of this participant have cost, as squared mu, in whatever federation.

    A repeated round costs again, because its noise is new. The count does not depend on the participant's encoder.
    """

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self.record = participant.record.read()
        method = method_for(participant.config)
        self.cost = method.spent(1) if isinstance(method, Noise) else 0.0  # the squared mu of one contribution

    def check(self) -> None:
        """Raise ProtocolError if another contribution would exceed the owner's limit."""
        if self.participant.budget is None:
            return
        budget, delta = self.participant.budget
        spent = epsilon_of(self.record.squared_mu + self.cost, delta)
        if spent > budget:
            raised = f"epsilon = {budget:g}; this round would raise what it has spent to {spent:.3g}"
            raise ProtocolError(f"{self.participant.name} has a privacy budget of {raised}. Raise limits.epsilon.")

    def spend(self) -> None:
        """Count one contribution, before it is sent. Check again: another federation may have spent meanwhile."""
        if self.cost:
            with self.participant.record.change() as self.record:
                self.check()
                self.record.squared_mu, self.record.releases = (
                    self.record.squared_mu + self.cost,
                    self.record.releases + 1,
                )

    def facts(self) -> dict[str, object]:
        """Return what was spent, for a model card; nothing without noise."""
        privacy = self.participant.config.privacy
        record = self.record
        if not record.releases:
            return {}
        spent = {"epsilon": epsilon_of(record.squared_mu, privacy.delta), "releases": record.releases}
        return {**spent, "delta": privacy.delta, "clip": privacy.clip, "secure_sums": privacy.secure}


def keep_metrics(participant: Participant, round_number: int, metrics: Mapping[str, float]) -> None:
    """Add the participant's own metrics of a round to a file on its disk. The server gets means of them, or nothing."""
    path = participant.states.path / "figures.json"
    before = read_json(path) if path.exists() else {}
    write_json(path, {**before, str(round_number): dict(metrics)})

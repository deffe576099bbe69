"""More rounds or other settings for an earlier run, which then continues from its last finished round.

Schedules over the rounds (`optim.schedule`, `ssl.ema_end`, `alignment.ramp_rounds`) are functions of the config and the
round: after the change, round 11 of a run that now has 30 rounds trains as round 11 of any run with 30 rounds does.
With constant schedules the result is bit-identical to that of a run that had all the rounds from its beginning.
"""

import logging
from collections.abc import Mapping
from typing import Any

from ..config import Config, flat, with_settings
from ..errors import ConfigError
from ..methods import method_for
from ..runs.folder import HISTORY, RunFolder

log = logging.getLogger(__name__)

WHO_MAY_JOIN = ("clients.seats", "clients.newcomers")
CHANGEABLE = (
    *WHO_MAY_JOIN,
    *("rounds", "local_epochs", "optim", "views", "averaging", "evaluation", "engine", "tracking"),
    *("clients.per_round", "ssl.ema", "ssl.ema_end", "ssl.temperature", "ssl.invariance", "ssl.variance"),
    *("ssl.covariance", "ssl.redundancy", "alignment.mu", "alignment.ramp_rounds", "alignment.when"),
    *("alignment.every", "alignment.temperature", "alignment.rad_batch", "alignment.memory", "alignment.augment_rad"),
)
"""Settings that may change between two rounds. The others define the data, the networks or the server's saved state."""


def continue_with(folder: RunFolder, settings: Mapping[str, Any]) -> Config:
    """Change settings of a run, finished or not, and return its new config. The earlier config and results are kept."""
    for key in flat(settings):
        if not any(f"{key}.".startswith(f"{allowed}.") for allowed in CHANGEABLE):
            raise ConfigError(
                f"'{key}' cannot change within a run, expected one of {', '.join(CHANGEABLE)}. Start another run."
            )
    before = folder.read_config()
    if before.privacy.epsilon is not None and "rounds" in settings:
        raise ConfigError(
            f"'rounds' cannot change in a run with privacy.epsilon = {before.privacy.epsilon:g}: the noise of all "
            f"rounds was chosen for {before.rounds} of them. Start another run."
        )
    after, done = with_settings(before, settings), rounds_done(folder)
    method_for(after)
    if after == before:
        if "rounds" in settings and folder.finished:  # not an error: a script that asks for more may run again
            log.warning(
                "'%s' has all of its %d rounds already. `rounds` counts those that are done, too.", folder.path, done
            )
        return before
    if after.rounds < done or (after.rounds == done and folder.finished):
        raise ConfigError(
            f"'{folder.path}' has finished {done} rounds, expected more than that in rounds = {after.rounds}: it is "
            "the number of all rounds, with those that are done. Raise it."
        )
    with folder.lock():
        earlier = folder.read_json(HISTORY)["earlier"] if (folder.path / HISTORY).exists() else []
        # In this order: whenever a crash interrupts it, the folder holds the run before or after the change.
        if folder.finished:
            (folder.path / "results.json").rename(folder.path / f"results-{done:06d}.json")
        folder.write_json(HISTORY, {"earlier": [*earlier, {"after_round": done, "config": before.to_toml()}]})
        folder.write_config(after)
    return after


def rounds_done(folder: RunFolder) -> int:
    """Return the last finished round; 0 before the first."""
    commit = folder.committed()
    return max(0, commit["round"]) if commit else 0

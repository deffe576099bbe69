"""Probes of the clients' encoders, after a round and at the end."""

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from flwr.app import RecordDict
from torch import Tensor

from ...errors import RunError
from ...learning.floors import FLOORS, FULL_WIDTH
from ...methods import ClientId, Method, ServerState
from ...methods.capabilities import GlobalModel
from ...runs.events import Evaluated, Evaluating, Finished, FloorProbed, never_trained
from ...runs.folder import resume_command
from ..wire import pack, read_metrics
from .roster import Roster


def evaluate(roster: Roster, number: int, split: str, export: bool = False) -> Evaluated:
    """Ask every connected client for its accuracy after a round."""
    scores: dict[ClientId, dict[str, float]] = {}

    def read(name: ClientId, content: RecordDict) -> None:
        scores[name] = read_metrics(content, roster.header(number), name)

    roster.listen(Evaluating(number, split))
    asked = sorted(roster.ids)
    contents = {name: pack(fields={**roster.fields(number, name), "split": split, "export": export}) for name in asked}
    roster.ask("evaluate", number, contents, read)
    scores = {name: scores[name] for name in asked if name in scores}
    event = Evaluated(number, split, scores, means(scores))
    roster.listen(event)
    return event


def probe_floors(roster: Roster, split: str) -> list[FloorProbed]:
    """Probe features that nobody trained, at the width of each encoder and at full width.

    On one machine all clients are probed with the same labels, so one client of each encoder answers for the others.
    """
    events = []
    for floor in FLOORS if roster.config.evaluation.floors and roster.config.evaluation.probes else ():
        scores: dict[ClientId, dict[str, float]] = {}

        def read(name: ClientId, content: RecordDict, scores: dict[ClientId, dict[str, float]] = scores) -> None:
            scores[name] = read_metrics(content, roster.header(0), name)

        speaker = {name: name for name in sorted(roster.ids)}
        if not roster.may_be_away:
            firsts = {str(roster.models[name]["encoder"]): name for name in sorted(roster.ids, reverse=True)}
            speaker = {name: firsts[str(roster.models[name]["encoder"])] for name in speaker}
        fields = {"split": split, "floor": floor}
        asked = {name: pack(fields={**roster.fields(0, name), **fields}) for name in sorted(set(speaker.values()))}
        roster.ask("evaluate", 0, asked, read)
        known = {name: scores[first] for name, first in speaker.items() if scores.get(first)}
        if known:
            events.append(FloorProbed(split, floor, known, means(known)))
            roster.listen(events[-1])
    return events


def below_floors(mean: Mapping[str, float], floors: Sequence[FloorProbed]) -> str | None:
    """Return a warning if trained encoders are not better than features of their width that nobody trained."""
    below = [
        f"{metric.partition('_')[0]} {mean[metric]:.1f} (floor: {floor.mean[metric]:.1f} of {floor.name})"
        for metric in mean
        for floor in floors
        if metric in floor.mean and mean[metric] < floor.mean[metric] and not floor.name.endswith(FULL_WIDTH)
    ]
    return f"the trained encoders are below features that nobody trained: {', '.join(below)}" if below else None


def evaluate_shared(roster: Roster, number: int, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Probe the global model at the first client that is able to. Only the metrics for all classes are kept."""
    scores: dict[str, float] = {}

    def read(name: ClientId, content: RecordDict) -> None:
        metrics = read_metrics(content, roster.header(number), name)
        scores.update({key: value for key, value in metrics.items() if key.endswith("_all")})

    for name in sorted(roster.ids):
        content = pack(weights, {**roster.fields(number), "split": "test"})
        if not roster.ask("evaluate", number, {name: content}, read, may_fail=True).excluded:
            return scores
    raise RunError(
        "no client could evaluate the global model. All training is kept; fix the problems above and "
        f"continue with: {resume_command(roster.folder.path)}"
    )


def finish(roster: Roster, method: Method, state: ServerState) -> None:
    """Evaluate on the test images and write results.json. No other step of a run uses the test images."""
    config, folder = roster.config, roster.folder
    final = evaluate(roster, state.round, "test", export=True)
    untrained = evaluate(roster, 0, "test") if config.evaluation.untrained else None
    floors = probe_floors(roster, "test")
    missing = [name for event in (final, untrained) if event for name in roster.ids if name not in event.clients]
    if missing and not roster.may_be_away:
        raise RunError(
            f"{', '.join(sorted(set(missing)))} could not be evaluated at the end; all training is kept. "
            f"Fix the problem above and continue with: {resume_command(folder.path)}"
        )
    untouched = never_trained(final.clients, folder.events())
    trained = {name: figures for name, figures in final.clients.items() if name not in untouched}
    results: dict[str, Any] = {
        "method": config.method,
        "round": state.round,
        "seed": config.seed,
        "clients": final.clients,
        "models": {name: roster.models[name] for name in final.clients},
        "mean": means(trained),
        "sd_over_clients": _deviations(trained),
        "untrained": untrained.clients if untrained else {},
        "floors": {floor.name: floor.clients for floor in floors},
    }
    warning = below_floors(results["mean"], floors)
    if warning:
        roster.warn(warning)
    if untouched:  # not part of the means
        results["never_trained"] = untouched
    absent = sorted(set(state.roster) - set(final.clients))
    if absent:  # a node that left keeps its model, but its figures are unknown
        results["absent"] = absent
    shared = method.global_model(state) if isinstance(method, GlobalModel) else {}
    if shared and config.evaluation.probes:  # without probes there is no need to send a whole model
        results["global"] = evaluate_shared(roster, state.round, shared)
    folder.write_json("results.json", results)
    roster.listen(Finished(state.round, results))


def means(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over clients of each metric."""
    return {key: sum(column) / len(column) for key, column in _columns(scores).items()}


def _deviations(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the sample standard deviation over clients of each metric."""
    return {key: stdev(column) for key, column in _columns(scores).items() if len(column) > 1}


def _columns(scores: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of each metric, of those clients that have it."""
    keys = sorted({key for values in scores.values() for key in values})
    return {key: [values[key] for values in scores.values() if key in values] for key in keys}

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
from ..wire import metrics_of, pack, reply_of
from .messenger import Contents
from .roster import Roster

Scores = dict[ClientId, dict[str, float]]


def ask_for_metrics(roster: Roster, number: int, contents: Contents, may_fail: bool = False) -> Scores:
    """Return the metrics of all clients that gave usable answers, in the order of the questions."""
    scores: Scores = {}

    def read(name: ClientId, content: RecordDict) -> None:
        with reply_of(name):
            scores[name] = metrics_of(content)

    roster.ask("evaluate", number, contents, read, may_fail=may_fail)
    return {name: scores[name] for name in contents if name in scores}


def evaluate(roster: Roster, number: int, split: str, export: bool = False) -> Evaluated:
    """Ask every connected client for its accuracy after a round."""
    roster.listen(Evaluating(number, split))
    asked = {name: roster.content(number, name, split=split, export=export) for name in sorted(roster.ids)}
    scores = ask_for_metrics(roster, number, asked)
    event = Evaluated(number, split, scores, means(scores))
    roster.listen(event)
    return event


def probe_floors(roster: Roster, split: str) -> list[FloorProbed]:
    """Probe features that nobody trained, at the width of each encoder and at full width.

    On one machine all clients are probed with the same labels, so one client of each encoder answers for the others.
    """
    speaker = {name: name for name in sorted(roster.ids)}
    if not roster.may_be_away:
        firsts = {roster.about[name].encoder: name for name in sorted(roster.ids, reverse=True)}
        speaker = {name: firsts[roster.about[name].encoder] for name in speaker}
    events = []
    for floor in FLOORS if roster.config.evaluation.floors and roster.config.evaluation.probes else ():
        asked = {name: roster.content(0, name, split=split, floor=floor) for name in sorted(set(speaker.values()))}
        scores = ask_for_metrics(roster, 0, asked)
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
    content = RecordDict({**roster.content(number, split="test"), "arrays": pack(weights)["arrays"]})
    for name in sorted(roster.ids):
        for metrics in ask_for_metrics(roster, number, {name: content}, may_fail=True).values():
            return {key: value for key, value in metrics.items() if key.endswith("_all")}
    resume = resume_command(roster.folder.path)
    raise RunError(f"no client could evaluate the global model. Fix the problems above and continue with: {resume}")


def finish(roster: Roster, method: Method, state: ServerState) -> None:
    """Evaluate on the test images and write results.json. No other step of a run uses the test images."""
    config, folder = roster.config, roster.folder
    final = evaluate(roster, state.round, "test", export=True)
    labeled = any(final.clients.values())  # otherwise there is nothing to compare with, and each question costs time
    untrained = evaluate(roster, 0, "test") if config.evaluation.untrained and labeled else None
    floors = probe_floors(roster, "test") if labeled else []
    missing = [name for event in (final, untrained) if event for name in roster.ids if name not in event.clients]
    if missing and not roster.may_be_away:
        who, resume = ", ".join(sorted(set(missing))), resume_command(folder.path)
        raise RunError(f"{who} could not be evaluated at the end. Fix the problem above and continue with: {resume}")
    untouched = never_trained(final.clients, folder.events())
    trained = {name: figures for name, figures in final.clients.items() if name not in untouched}
    about = {name: roster.about[name] for name in final.clients}
    results: dict[str, Any] = {
        "method": config.method,
        "round": state.round,
        "seed": config.seed,
        "clients": final.clients,
        "models": {name: {"encoder": it.encoder, "parameters": it.parameters} for name, it in about.items()},
        "mean": means(trained),
        "sd_over_clients": {key: stdev(column) for key, column in _columns(trained).items() if len(column) > 1},
        "untrained": untrained.clients if untrained else {},
        "floors": {floor.name: floor.clients for floor in floors},
    }
    roster.warn(below_floors(results["mean"], floors))
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
    """Return the mean of each metric over the clients that have it."""
    return {key: sum(column) / len(column) for key, column in _columns(scores).items()}


def _columns(scores: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    keys = sorted({key for values in scores.values() for key in values})
    return {key: [values[key] for values in scores.values() if key in values] for key in keys}

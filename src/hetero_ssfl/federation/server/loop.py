"""The server's side: one loop for every method and every engine.

1. hello      ask each node for its name (roster.py); repeated before every round, for new nodes;
2. opening    if the method needs it, ask all clients or the first one for a reply before training;
3. rounds     sample clients by name, broadcast, wait for replies up to a deadline, check, aggregate, save; with
              `privacy.secure` as a secure sum (sums.py);
4. the end    every client is probed on the test images, once, and exports its encoder as a model.

Saving the state commits a round: a run killed at any point continues from the last saved state and ends with
bit-identical results.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import stdev
from typing import Any

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ...config import Config
from ...errors import FaultError, LostStateError, ProtocolError, RunError, TooFewRepliesError
from ...methods import ClientId, Method, ServerState, Update, method_for
from ...methods.base import without
from ...methods.capabilities import Forgets, GlobalModel, KernelSnapshot, Metrics, SecureSums, Warnings
from ...runs.events import (
    ClientTrained,
    Evaluated,
    Evaluating,
    Event,
    Finished,
    KernelsSeen,
    Listener,
    RoundBegun,
    RoundDone,
    Started,
    never_trained,
)
from ...runs.folder import RunFolder, resume_command
from ...seeding import rng_for
from ..wire import Scalar, check_size, pack, read_figures, read_update
from .outcome import Outcome
from .roster import Roster, has_diverged
from .saving import Saved, restore_state, save_contribution, save_state, step_back
from .seats import believed_sizes, typical_opening
from .sums import SecureRound

MIN_SPREAD = 0.1  # of a client's features: 1 is isotropic, 0 is a single point


class Server:
    def __init__(
        self, grid: Grid, folder: RunFolder, config: Config, listen: Listener, may_be_away: bool = False
    ) -> None:
        self.folder, self.config, self.listen, self.may_be_away = folder, config, listen, may_be_away
        self.method: Method = method_for(config)
        self.roster = Roster(grid, folder, config, listen, may_be_away)
        self.doubted: set[ClientId] = set()
        """Clients whose claimed number of images was reduced."""
        self.trained: dict[ClientId, int] = {}
        """The last round in which each client trained and saved its state."""
        self.stepped_back = False

    # --- the loop ---

    def run(self) -> None:
        """Run all remaining rounds. A damaged state is computed again from the round before it, once."""
        try:
            saved = restore_state(self.folder)
        except LostStateError as error:
            saved = self.step_back(error)
        self.roster.gather(saved.state if saved else None)
        while True:
            try:
                return self.play_all(saved)
            except LostStateError as error:
                saved = self.step_back(error)

    def step_back(self, lost: LostStateError) -> Saved:
        """Return to the round before the last one. Repeating it gives the same bits, and replaces what is damaged."""
        new_bits = self.config.privacy.secure or self.config.privacy.epsilon is not None  # masks, noise
        saved = None if self.stepped_back or new_bits else step_back(self.folder)
        if saved is None:
            raise FaultError(f"{lost} The round before it cannot be repeated.") from None
        self.stepped_back = True
        self.roster.warn(f"{lost} The run goes back to round {max(0, saved.state.round)} and repeats what followed.")
        return saved

    def play_all(self, saved: Saved | None) -> None:
        if saved is None:
            everyone = tuple(sorted(self.roster.ids))
            first = 0 if self.method.opening == "nobody" else -1
            saved = Saved(ServerState(first, everyone, seats=self.roster.held()), dict.fromkeys(everyone, 0))
        state, everyone, self.trained = saved.state, saved.state.roster, dict(saved.trained)
        self.listen(Started(max(0, state.round), self.config.rounds, everyone))
        warning = self.method.start_warning(len(everyone)) if isinstance(self.method, Warnings) else None
        if warning:
            self.roster.warn(warning)
        if state.round <= 0 and self.config.evaluation.every and not self.folder.events():
            self.folder.append_events([self.evaluate(0, "validation")])
        if state.round < 0:
            # In a real federation all are asked, so that one client alone does not choose the first weights.
            state = self.play(state, everyone[:1] if self.opens_alone(state) and not self.may_be_away else everyone)
        while state.round < self.config.rounds:
            state = self.forget_absent(self.roster.welcome(state))
            state = self.play(state, self.sample(state))
        self.finish(state)

    def play(self, state: ServerState, selected: tuple[ClientId, ...]) -> ServerState:
        """Run one round, from the broadcast to the saved state."""
        number = self.roster.number = state.round + 1
        started = time.perf_counter()
        self.listen(RoundBegun(number, selected))
        broadcasts = self.broadcasts(state, selected, number)
        if self.config.privacy.secure:
            assert isinstance(self.method, SecureSums)  # method_for has checked it
            secure = SecureRound(self.roster, self.method, number, selected)
            done = secure.play(state, broadcasts)
            self.trained |= dict.fromkeys(secure.trained, number) if number > 0 else {}
        else:
            done = self.play_plain(state, broadcasts, number)
        state, events = done.state, done.events
        if number > 0 and self.due(number):
            events.append(self.evaluate(number, "validation"))
        kernels = self.method.kernel_snapshot(state) if isinstance(self.method, KernelSnapshot) else {}
        events += [KernelsSeen(number, **kernels)] if kernels else []
        summary = self.summary(done, time.perf_counter() - started)
        self.folder.append_events([*events, summary])
        state = save_state(self.folder, state, self.trained)
        for name in selected if not self.may_be_away else ():
            self.folder.states(name).prune()
        self.listen(summary)
        return state

    def broadcasts(self, state: ServerState, selected: tuple[ClientId, ...], number: int) -> dict[ClientId, RecordDict]:
        """Return the messages of a round. Clients that are sent the same arrays share one copy."""
        packed: dict[tuple[int, ...], RecordDict] = {}
        contents = {}
        for name in selected:
            arrays = self.method.broadcast(state, name).arrays
            same = packed.get(key := tuple(map(id, arrays.values())))
            whole = same or pack(arrays)
            contents[name] = RecordDict({**pack(fields=self.fields(name, number)), "arrays": whole["arrays"]})
            if all(any(array is kept for kept in state.shared.values()) for array in arrays.values()):
                packed[key] = whole  # the state keeps these arrays alive, so no other has their ids
        return contents

    def play_plain(self, state: ServerState, contents: Mapping[ClientId, RecordDict], number: int) -> Outcome:
        """Run a round in which the server sees each reply."""
        updates, events, diverged = self.collect(state, contents, number)
        needed = min(self.config.engine.min_replies, len(contents))
        if self.opens_alone(state):
            needed = 1
        if len(updates) < needed:
            if diverged:
                raise self.diverged(state, diverged[0])
            raise TooFewRepliesError(
                f"round {number} got {len(updates)} usable replies, expected at least {needed}. First reason: "
                f"{next(excluded_in(events), 'none')} "
                f"Fix this and continue with: {resume_command(self.folder.path)}"
            )
        updates = self.weighed(state, updates) if self.may_be_away else updates
        means = _means({name: dict(update.metrics) for name, update in updates.items()})
        return Outcome(self.method.aggregate(state, updates), events, len(updates), means)

    def diverged(self, state: ServerState, reason: str) -> TooFewRepliesError:
        lower = resume_command(self.folder.path, "optim.lr", self.config.optim.lr / 10)
        return TooFewRepliesError(
            f"the loss diverged: {reason} Round {max(0, state.round)}, the last finished one, is kept: continue from "
            f"there with, for example, a lower learning rate: {lower}"
        )

    def collect(
        self, state: ServerState, contents: Mapping[ClientId, RecordDict], number: int
    ) -> tuple[dict[ClientId, Update], list[Event], list[str]]:
        """Send the round's messages. Return the usable replies, one event per selected client, and the reasons of
        clients whose loss diverged."""
        updates: dict[ClientId, Update] = {}
        sizes: dict[ClientId, int] = {}
        excluded: dict[ClientId, str] = {}
        diverged: list[str] = []
        missing: dict[ClientId, Message | None] = {}

        def take(name: ClientId, reply: Message | None) -> None:
            if self.roster.is_missing(reply):
                missing[name] = reply
                return
            if number > 0 and reply is not None and not reply.has_error():
                self.trained[name] = number
            try:
                update, sizes[name] = self.accept(state, name, reply, number)
            except ProtocolError as error:
                excluded[name] = str(error)
                diverged.extend([str(error)] if has_diverged(reply) else [])
                self.roster.warn(str(error))
                return
            if self.method.keeps_replies:  # in memory the replies of a round could be many
                update = replace(update, arrays=save_contribution(self.folder, name, number, update.arrays))
            updates[name] = update

        sent = self.roster.exchange("train", number, contents, take)
        for name in contents:
            if name not in updates and name not in excluded and name not in missing:
                take(name, None)
        if missing:
            self.roster.stop(missing, f"in round {number}")
        events: list[Event] = []
        for name in contents:
            if name in excluded:
                events.append(ClientTrained(number, name, sent[name], excluded=excluded[name]))
                continue
            update = updates[name]
            warning = collapse_warning(update)
            if warning:
                self.roster.warn(f"{name}: {warning}")
            figures = dict(update.metrics)
            examples = update.examples if self.config.privacy.epsilon is None else None  # with noise it is not sent
            events.append(
                ClientTrained(number, name, sent[name], sizes[name], examples, warning=warning, figures=figures)
            )
        return {name: updates[name] for name in contents if name in updates}, events, diverged

    # --- no participant counts for more than its seat ---

    def opens_alone(self, state: ServerState) -> bool:
        """Tell whether the next round is an opening that needs the reply of one client only."""
        return state.round < 0 and self.method.opening == "first"

    def weighed(self, state: ServerState, updates: dict[ClientId, Update]) -> dict[ClientId, Update]:
        """Return the replies with bounded sizes; of an opening that needs one client's weights, only a typical one."""
        if self.opens_alone(state):
            chosen = typical_opening(updates)
            return {chosen: updates[chosen]}
        claims = {name: update.examples for name, update in updates.items()}
        others = {**{name: n for name, n in self.roster.examples.items() if n > 0}, **state.examples}
        sizes = believed_sizes(claims, others, self.config.clients)
        for name in (name for name in claims if sizes[name] < claims[name] and name not in self.doubted):
            self.doubted.add(name)
            self.roster.warn(
                f"{name} claims {claims[name]:,} images, which count as {sizes[name]:,}. "
                "If the number is right, register it: clients.seats."
            )
        return {name: replace(update, examples=sizes[name]) for name, update in updates.items()}

    def forget_absent(self, state: ServerState) -> ServerState:
        gone = [name for name in self.roster.gone(state) if name in state.clients]
        if not gone:
            return state
        after = self.method.forget(state, gone) if isinstance(self.method, Forgets) else without(state, gone)
        for name in (name for name in gone if name not in after.clients):
            self.roster.warn(
                f"{name} is absent for {self.config.clients.absent_rounds} rounds: its contribution leaves."
            )
        return after

    # --- the clients of a round ---

    def fields(self, name: ClientId, number: int) -> dict[str, Scalar]:
        """Return the fields of a message. A client of this machine is told which of its states it must start from."""
        known = not self.may_be_away and name in self.trained
        return {**self.roster.fields(number), **({"starts_after": self.trained[name]} if known else {})}

    def sample(self, state: ServerState) -> tuple[ClientId, ...]:
        """Sample the clients of the next round. The result depends only on the connected names and the seed."""
        online = [name for name in state.roster if name in self.roster.ids]
        wanted = self.config.clients.selected_per_round(len(online))
        rng = rng_for(self.config.seed, "sample", state.round + 1)
        chosen = torch.randperm(len(online), generator=rng)[:wanted].sort().values
        return tuple(online[int(k)] for k in chosen)

    def due(self, number: int) -> bool:
        every = self.config.evaluation.every
        return bool(every) and (number % every == 0 or number == self.config.rounds)

    def accept(self, state: ServerState, name: ClientId, reply: Message | None, number: int) -> tuple[Update, int]:
        """Return a checked reply and its size in bytes. Raise ProtocolError if the reply cannot be used."""
        if reply is None:
            raise ProtocolError(f"{name} did not reply within {self.config.engine.round_timeout:g} s.")
        if reply.has_error():
            raise ProtocolError(f"{name} failed: {self.roster.reason(name, reply)}.")
        size = check_size(reply, self.config.engine.message_mb, name)
        try:
            update = read_update(reply.content, self.roster.header(number), name)
        except Exception as error:  # whatever a reply breaks is the fault of its sender
            raise ProtocolError(f"{name} sent a reply that cannot be used: {error}") from None
        self.check(state, name, update)
        return update, size

    def check(self, state: ServerState, name: ClientId, update: Update) -> None:
        try:
            self.method.check(state, name, update)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError(f"{name} sent a reply that cannot be checked: {str(error)[:200]}.") from None

    # --- figures ---

    def evaluate(self, number: int, split: str, export: bool = False) -> Evaluated:
        more: dict[str, Scalar] = {"split": split, "export": export}
        self.listen(Evaluating(number, split))
        asked = sorted(self.roster.ids)
        replies: dict[ClientId, Message] = {}
        contents = {name: pack(fields={**self.fields(name, number), **more}) for name in asked}
        self.roster.exchange("evaluate", number, contents, replies.__setitem__)
        missing = {name: replies.get(name) for name in asked if self.roster.is_missing(replies.get(name))}
        if missing:
            self.roster.stop(missing, f"in the evaluation after round {number}")
        scores = {}
        for name in asked:
            try:
                scores[name] = self.figures(name, replies.get(name), number)
            except ProtocolError as error:
                self.roster.warn(f"{name} could not be evaluated: {error}")
        event = Evaluated(number, split, scores, _means(scores))
        self.listen(event)
        return event

    def figures(self, name: ClientId, reply: Message | None, number: int) -> dict[str, float]:
        if reply is None:
            raise ProtocolError("no reply in time.")
        if reply.has_error():
            raise ProtocolError(f"{self.roster.reason(name, reply)}.")
        check_size(reply, self.config.engine.message_mb, name)
        return read_figures(reply.content, self.roster.header(number), name)

    def evaluate_shared(self, number: int, weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Probe the global model at the first client that is able to. Only the figures for all classes are kept."""
        fields: dict[str, Scalar] = {**self.roster.fields(number), "split": "test"}
        for name in sorted(self.roster.ids):
            replies: dict[ClientId, Message] = {}
            self.roster.exchange("evaluate", number, {name: pack(weights, fields)}, replies.__setitem__)
            try:
                found = self.figures(name, replies.get(name), number)
            except ProtocolError as error:
                self.roster.warn(f"{name} could not evaluate the global model: {error}")
                continue
            return {key: value for key, value in found.items() if key.endswith("_all")}
        raise RunError(
            "no client could evaluate the global model. All training is kept; fix the problems above and "
            f"continue with: {resume_command(self.folder.path)}"
        )

    def summary(self, done: Outcome, seconds: float) -> RoundDone:
        state = done.state
        figures = {**done.figures, **(self.method.metrics(state) if isinstance(self.method, Metrics) else {})}
        warning = self.method.round_warning(figures) if isinstance(self.method, Warnings) else None
        if warning:
            self.roster.warn(warning)
        away = [name for name in state.roster if name not in self.roster.ids]
        return RoundDone(state.round, done.replies, round(seconds, 3), away or None, figures)

    def finish(self, state: ServerState) -> None:
        """Evaluate on the test images and write results.json. No other step of a run uses the test images."""
        final = self.evaluate(state.round, "test", export=True)
        untrained = self.evaluate(0, "test") if self.config.evaluation.untrained else None
        missing = [
            name for event in (final, untrained) if event for name in self.roster.ids if name not in event.clients
        ]
        if missing and not self.may_be_away:
            raise RunError(
                f"{', '.join(sorted(set(missing)))} could not be evaluated at the end; all training is kept. "
                f"Fix the problem above and continue with: {resume_command(self.folder.path)}"
            )
        untouched = never_trained(final.clients, self.folder.events())
        trained = {name: figures for name, figures in final.clients.items() if name not in untouched}
        results: dict[str, Any] = {
            "method": self.config.method,
            "round": state.round,
            "seed": self.config.seed,
            "clients": final.clients,
            "models": {name: self.roster.models[name] for name in final.clients},
            "mean": _means(trained),
            "sd_over_clients": _deviations(trained),
            "untrained": untrained.clients if untrained else {},
        }
        if untouched:  # not part of the means
            results["never_trained"] = untouched
        absent = sorted(set(state.roster) - set(final.clients))
        if absent:  # a node that left keeps its model, but its figures are unknown
            results["absent"] = absent
        shared = self.method.global_model(state) if isinstance(self.method, GlobalModel) else {}
        if shared and self.config.evaluation.probes:  # without probes there is no need to send a whole model
            results["global"] = self.evaluate_shared(state.round, shared)
        self.folder.write_json("results.json", results)
        self.listen(Finished(state.round, results))


def collapse_warning(update: Update) -> str | None:
    """Return a warning if a client maps all images to nearly the same features."""
    spread = update.metrics.get("spread", 1.0)
    return f"features have collapsed (spread {spread:.3f})" if spread < MIN_SPREAD else None


def excluded_in(events: Iterable[Event]) -> Iterator[str]:
    """Yield the reasons for which replies were excluded."""
    yield from (event.excluded for event in events if isinstance(event, ClientTrained) and event.excluded)


def _deviations(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the sample standard deviation over clients of each figure."""
    keys = sorted({key for values in scores.values() for key in values})
    columns = {key: [v[key] for v in scores.values() if key in v] for key in keys}
    return {key: stdev(column) for key, column in columns.items() if len(column) > 1}


def _means(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    keys = sorted({key for values in scores.values() for key in values})
    return {
        key: sum(v[key] for v in scores.values() if key in v) / sum(key in v for v in scores.values()) for key in keys
    }

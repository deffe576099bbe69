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
from collections.abc import Mapping
from dataclasses import replace

import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid

from ...config import Config
from ...errors import FaultError, LostStateError, TooFewRepliesError
from ...methods import ClientId, Method, ServerState, Update, method_for
from ...methods.base import without
from ...methods.capabilities import ComparesReplies, Forgets, KernelSnapshot, Metrics, SecureSums, Warnings
from ...runs.events import ClientTrained, Evaluated, Event, KernelsSeen, Listener, RoundBegun, RoundDone, Started
from ...runs.folder import RunFolder, resume_command
from ...seeding import rng_for
from ..wire import pack, read_update
from .evaluating import evaluate, finish, means, probe_floors
from .messenger import Contents
from .roster import Roster
from .saving import restore_state, save_contribution, save_state, step_back
from .seats import capped_sizes, typical_opening
from .sums import Outcome, SecureRound

MIN_SPREAD = 0.1  # of a client's features: 1 is isotropic, 0 is a single point


class Server:
    def __init__(self, grid: Grid, folder: RunFolder, config: Config, listen: Listener) -> None:
        self.folder, self.config, self.listen = folder, config, listen
        self.method: Method = method_for(config)
        self.roster = Roster(grid, folder, config, listen)
        self.may_be_away = self.roster.may_be_away
        self.doubted: set[ClientId] = set()  # clients whose claimed number of images was reduced
        self.stepped_back = False
        self.has_labels = True  # until nobody could answer the first evaluation: each one costs time

    def run(self) -> None:
        """Run all remaining rounds. A damaged state is computed again from the round before it, once."""
        try:
            state = restore_state(self.folder)
        except LostStateError as error:
            state = self.step_back(error)
        self.roster.gather(state)
        while True:
            try:
                return self.play_all(state)
            except LostStateError as error:
                state = self.step_back(error)

    def step_back(self, lost: LostStateError) -> ServerState:
        """Return to the round before the last one. Repeating it gives the same bits, and replaces what is damaged."""
        new_bits = self.config.privacy.secure or self.config.privacy.epsilon is not None  # masks, noise
        state = None if self.stepped_back or new_bits else step_back(self.folder)
        if state is None:
            raise FaultError(f"{lost} The round before it cannot be repeated.") from None
        self.stepped_back = True
        self.roster.warn(f"{lost} The run goes back to round {max(0, state.round)} and repeats what followed.")
        return state

    def play_all(self, state: ServerState | None) -> None:
        if state is None:
            everyone = tuple(sorted(self.roster.ids))
            first = 0 if self.method.opening == "nobody" else -1
            state = ServerState(first, everyone, seats=self.roster.held(), trained=dict.fromkeys(everyone, 0))
        everyone, self.roster.trained = state.roster, dict(state.trained)
        self.listen(Started(max(0, state.round), self.config.rounds, everyone))
        self.roster.warn(self.method.start_warning(len(everyone)) if isinstance(self.method, Warnings) else None)
        if state.round <= 0 and self.config.evaluation.every and not self.folder.events():
            untrained = evaluate(self.roster, 0, "validation")
            floors = probe_floors(self.roster, "validation") if any(untrained.clients.values()) else []
            self.folder.append_events([*floors, untrained])
        probed = [e for e in self.folder.events() if isinstance(e, Evaluated) and e.clients]
        self.has_labels = not probed or any(any(event.clients.values()) for event in probed)
        if state.round < 0:
            # In a real federation all are asked, so that one client alone does not choose the first weights.
            state = self.play(state, everyone[:1] if self.opens_alone(state) and not self.may_be_away else everyone)
        while state.round < self.config.rounds:
            state = self.forget_absent(self.roster.welcome(state))
            state = self.play(state, self.sample(state))
        finish(self.roster, self.method, state)

    def play(self, state: ServerState, selected: tuple[ClientId, ...]) -> ServerState:
        """Run one round, from the broadcast to the saved state."""
        number = self.roster.number = state.round + 1
        started = time.perf_counter()
        self.listen(RoundBegun(number, selected))
        broadcasts = self.broadcasts(state, selected, number)
        if self.config.privacy.secure:
            assert isinstance(self.method, SecureSums)  # method_for has checked it
            secure = SecureRound(self.roster, self.method, number, selected, state.roster)
            done = secure.play(state, broadcasts)
        else:
            done = self.play_plain(state, broadcasts, number)
        state, events = done.state, done.events
        every = self.config.evaluation.every
        if every and self.has_labels and number > 0 and (number % every == 0 or number == self.config.rounds):
            events.append(evaluate(self.roster, number, "validation"))
        kernels = self.method.kernel_snapshot(state) if isinstance(self.method, KernelSnapshot) else {}
        events += [KernelsSeen(number, **kernels)] if kernels else []
        summary = self.summary(done, time.perf_counter() - started)
        self.folder.append_events([*events, summary])
        state = save_state(self.folder, replace(state, trained=dict(self.roster.trained)))
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
            contents[name] = RecordDict({**self.roster.content(number, name), "arrays": whole["arrays"]})
            if all(any(array is kept for kept in state.shared.values()) for array in arrays.values()):
                packed[key] = whole  # the state keeps these arrays alive, so no other has their ids
        return contents

    def play_plain(self, state: ServerState, contents: Contents, number: int) -> Outcome:
        """Run a round in which the server sees each reply."""
        updates: dict[ClientId, Update] = {}

        def read(name: ClientId, content: RecordDict) -> None:
            update = read_update(content, name)
            self.method.check(state, name, update)
            if self.method.keeps_replies:  # in memory the replies of a round could be many
                update = replace(update, arrays=save_contribution(self.folder, name, number, update.arrays))
            updates[name] = update

        answers = self.roster.ask("train", number, contents, read)
        updates = {name: updates[name] for name in contents if name in updates}  # not in the order of arrival
        counted = self.weighed(state, updates) if self.may_be_away and updates else updates
        for name, reason in self.misfits(state, counted).items():
            answers.excluded[name] = reason
            self.roster.warn(reason)
            updates, counted = ({n: u for n, u in each.items() if n != name} for each in (updates, counted))
        needed = 1 if self.opens_alone(state) else min(self.config.engine.min_replies, len(contents))
        if len(updates) < needed:
            what = f"round {number} got {len(updates)} usable replies, expected at least {needed}. First reason"
            remedy = f"Fix this and continue with: {resume_command(self.folder.path)}"
            if answers.diverged:
                lower = resume_command(self.folder.path, "optim.lr", self.config.optim.lr / 10)
                what, remedy = "the loss diverged", f"Continue with, for example, a lower learning rate: {lower}"
            first = [*answers.diverged, *answers.excluded.values(), "none."][0]
            raise TooFewRepliesError(f"{what}: {first} {remedy}")
        events: list[Event] = []
        for name, sent in answers.sent.items():
            if name in answers.excluded:
                events.append(ClientTrained(number, name, sent, excluded=answers.excluded[name]))
                continue
            update, size = updates[name], answers.received[name]
            warning = collapse_warning(update)
            self.roster.warn(warning and f"{name}: {warning}")
            examples = update.examples if self.config.privacy.epsilon is None else None  # with noise it is not sent
            figures = dict(update.metrics)
            events.append(ClientTrained(number, name, sent, size, examples, warning=warning, figures=figures))
        metrics = means({name: update.metrics for name, update in counted.items()})
        return Outcome(self.method.aggregate(state, counted), events, len(counted), metrics)

    def misfits(self, state: ServerState, updates: Mapping[ClientId, Update]) -> Mapping[ClientId, str]:
        """Return why replies must not be used, of which each is fine by itself."""
        return self.method.misfits(state, updates) if isinstance(self.method, ComparesReplies) else {}

    def opens_alone(self, state: ServerState) -> bool:
        """Tell whether the next round is an opening that needs the reply of one client only."""
        return state.round < 0 and self.method.opening == "first"

    def weighed(self, state: ServerState, updates: dict[ClientId, Update]) -> dict[ClientId, Update]:
        """Return the replies with bounded sizes; of an opening that needs one client's weights, only a typical one."""
        if self.opens_alone(state):
            chosen = typical_opening(updates)
            return {chosen: updates[chosen]}
        claims = {name: update.examples for name, update in updates.items()}
        reported = {name: about.examples for name, about in self.roster.about.items() if about.examples > 0}
        sizes = capped_sizes(claims, {**reported, **state.examples}, self.config.clients)
        for name in (name for name in claims if sizes[name] < claims[name] and name not in self.doubted):
            self.doubted.add(name)
            remedy = "If the number is right, register it: clients.seats."
            self.roster.warn(f"{name} claims {claims[name]:,} images, which count as {sizes[name]:,}. {remedy}")
        return {name: replace(update, examples=sizes[name]) for name, update in updates.items()}

    def forget_absent(self, state: ServerState) -> ServerState:
        gone = [name for name in self.roster.gone(state) if name in state.clients]
        if not gone:
            return state
        after = self.method.forget(state, gone) if isinstance(self.method, Forgets) else without(state, gone)
        rounds = self.config.clients.absent_rounds
        for name in (name for name in gone if name not in after.clients):
            self.roster.warn(f"{name} is absent for {rounds} rounds: its contribution leaves.")
        return after

    def sample(self, state: ServerState) -> tuple[ClientId, ...]:
        """Sample the clients of the next round. The result depends only on the connected names and the seed."""
        online = [name for name in state.roster if name in self.roster.ids]
        wanted = self.config.clients.selected_per_round(len(online))
        rng = rng_for(self.config.seed, "sample", state.round + 1)
        chosen = torch.randperm(len(online), generator=rng)[:wanted].sort().values
        return tuple(online[int(k)] for k in chosen)

    def summary(self, done: Outcome, seconds: float) -> RoundDone:
        state = done.state
        figures = {**done.figures, **(self.method.metrics(state) if isinstance(self.method, Metrics) else {})}
        self.roster.warn(self.method.round_warning(figures) if isinstance(self.method, Warnings) else None)
        away = [name for name in state.roster if name not in self.roster.ids]
        return RoundDone(state.round, done.replies, round(seconds, 3), away or None, figures)


def collapse_warning(update: Update) -> str | None:
    """Return a warning if a client maps all images to nearly the same features."""
    spread = update.metrics.get("spread", 1.0)
    return f"features have collapsed (spread {spread:.3f})" if spread < MIN_SPREAD else None

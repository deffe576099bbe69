"""The server's side: one loop for every method and every engine.

1. hello      ask each node its name (node ids are random, names are not); also before every round, for newcomers;
2. opening    where the method wants it, all clients or the first answer once, untrained;
3. rounds     sample clients by name, broadcast, wait for replies up to a deadline, check, aggregate, save;
4. the end    every client is probed on the test images, once, and keeps its encoder as a model.

The state saved after a round is its commit point: a run killed anywhere goes on from there and ends with the same bits.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from statistics import stdev
from typing import Any

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..config import Config
from ..errors import ProtocolError, RunError
from ..methods import ClientId, Method, ServerState, Update, method_for
from ..runs import RunFolder, load_tensors, resume_command, save_tensors
from ..seeding import rng_for
from .records import (
    NAME,
    Header,
    Scalar,
    check_header,
    check_size,
    header_of,
    pack,
    read_figures,
    read_update,
    settings_of,
    with_rad,
)

Event = dict[str, Any]
Listener = Callable[[Event], None]

COLLAPSED = 0.1  # feature spread: 1 is isotropic, 0 a single point
POOR_RANK = 3.0  # effective rank of the consensus


class Server:
    def __init__(self, grid: Grid, folder: RunFolder, config: Config, listen: Listener) -> None:
        self.grid, self.folder, self.config, self.listen = grid, folder, config, listen
        self.method: Method = method_for(config)
        self.config_toml = config.to_toml()
        self.federation = str(folder.read_json("facts.json")["federation"])
        rad, about = load_tensors(folder.path / "rad.safetensors")
        self.rad, self.rad_digest = rad["pixels"], str(about["digest"])
        self.number = 0  # of the round being played
        self.nodes: dict[ClientId, int] = {}
        self.refused: dict[int, str] = {}  # connected nodes that cannot take part, and why
        self.without_rad: set[ClientId] = set()
        self.ask_again: dict[int, float] = {}  # when to ask nodes that did not say properly who they are

    # --- the loop ---

    def run(self) -> None:
        state = self.restore()
        self.gather(state)
        if state is None:
            state = ServerState(0 if self.method.opening == "nobody" else -1, tuple(sorted(self.nodes)))
        roster = state.roster
        self.folder.forget_events_after(state.round)
        self.listen({"event": "start", "round": max(0, state.round), "rounds": self.config.rounds, "clients": roster})
        if state.round <= 0 and self.config.evaluation.every and not self.folder.events():
            self.folder.append_events([self.evaluate(0, "validation")])
        if state.round < 0:
            state = self.play(state, roster if self.method.opening == "all" else roster[:1])
        while state.round < self.config.rounds:
            state = self.welcome(state)
            state = self.play(state, self.sample(state))
        self.finish(state)

    def play(self, state: ServerState, selected: tuple[ClientId, ...]) -> ServerState:
        """One round, from broadcast to the saved state."""
        number = self.number = state.round + 1
        started = time.perf_counter()
        self.listen({"event": "begin", "round": number, "clients": selected})
        contents = {n: pack(self.method.broadcast(state, n).arrays, self.settings(number)) for n in selected}
        replies, sent = self.exchange("train", number, contents)
        updates, events = {}, []
        for name in selected:
            event = {"event": "client", "round": number, "client": name, "bytes_down": sent[name]}
            try:
                update, size = self.accept(state, name, replies.get(name), number)
            except ProtocolError as error:
                events.append({**event, "excluded": str(error)})
                self.warn(str(error))
                continue
            updates[name] = update
            event |= {"bytes_up": size, "examples": update.examples, **update.metrics}
            if update.metrics.get("spread", 1.0) < COLLAPSED:
                event["warning"] = f"features have collapsed (spread {update.metrics['spread']:.3f})"
                self.warn(f"{name}: {event['warning']}")
            events.append(event)
        needed = min(self.config.engine.min_replies, len(selected))
        if len(updates) < needed:
            raise RunError(
                f"round {number} got {len(updates)} usable replies, expected at least {needed}. First reason: "
                f"{next((e['excluded'] for e in events if 'excluded' in e), 'none')} "
                f"Mend it and continue with: {resume_command(self.folder.path)}"
            )
        state = self.method.aggregate(state, updates)
        if number > 0 and self.due(number):
            events.append(self.evaluate(number, "validation"))
        events.append(self.summary(state, updates, time.perf_counter() - started))
        self.folder.append_events(events)
        self.save(state)
        self.listen(events[-1])
        return state

    def sample(self, state: ServerState) -> tuple[ClientId, ...]:
        """The clients of the next round, by name and by the seed alone."""
        online = [name for name in state.roster if name in self.nodes]
        wanted = self.config.clients.selected_per_round(len(online))
        rng = rng_for(self.config.seed, "sample", state.round + 1)
        chosen = torch.randperm(len(online), generator=rng)[:wanted].sort().values
        return tuple(online[int(k)] for k in chosen)

    def due(self, number: int) -> bool:
        every = self.config.evaluation.every
        return bool(every) and (number % every == 0 or number == self.config.rounds)

    # --- talking to clients ---

    def gather(self, state: ServerState | None) -> None:
        """Wait until all clients of the config are there; a resumed run goes on without those that stay away."""
        patience = self.config.engine.round_timeout if state is None else self.config.engine.join_timeout
        deadline = time.monotonic() + patience
        expected = self.config.clients.count if state is None else len(state.roster)
        while True:
            self.hello()
            if len(self.nodes) >= expected:
                return
            may_go_on_without = state is not None and not self.folder.simulated
            if len(self.nodes) + len(self.refused) >= expected and not may_go_on_without:
                raise RunError(f"{next(iter(self.refused.values()))} Mend it and try again.")
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if state is None or len(self.nodes) < self.config.engine.min_replies:
            raise RunError(f"only {len(self.nodes)} of {expected} clients answered in time. Start the others.")
        missing = sorted(set(state.roster) - set(self.nodes))
        self.warn(f"{', '.join(missing)} did not come back; going on without.")

    def welcome(self, state: ServerState) -> ServerState:
        """Before a round: who left, who is new, and whether enough are there."""
        deadline = time.monotonic() + self.config.engine.round_timeout
        self.hello()
        needed = self.config.engine.min_replies
        while len(self.nodes) < needed:
            if time.monotonic() > deadline:
                raise RunError(
                    f"only {len(self.nodes)} nodes are connected, expected at least {needed}. "
                    f"Start the others and continue with: {resume_command(self.folder.path)}"
                )
            time.sleep(1.0)
            self.hello()
        newcomers = tuple(sorted(set(self.nodes) - set(state.roster)))
        return replace(state, roster=(*state.roster, *newcomers))  # at the end: places of the others stay theirs

    def hello(self) -> None:
        """Learn the name of every node that is new; forget those that are gone."""
        connected = set(self.grid.get_node_ids())
        for name in [name for name, node in self.nodes.items() if node not in connected]:
            del self.nodes[name]
            self.listen({"event": "left", "round": self.number, "client": name})
        self.refused = {node: reason for node, reason in self.refused.items() if node in connected}
        now = time.monotonic()
        waiting = {node for node, until in self.ask_again.items() if until > now}
        unknown = connected - set(self.nodes.values()) - waiting
        if not unknown:
            return
        channels, side = self.rad.shape[1:3]
        content = pack(settings={**self.settings(0), "channels": channels, "side": side})
        messages = {node: Message(content, node, "query") for node in sorted(unknown)}
        patience = min(self.config.engine.join_timeout, self.config.engine.round_timeout)
        replies = self.send(messages, now + patience)
        facts = []
        for node in sorted(unknown):
            try:
                about = self.introduced(replies.get(node))
            except ProtocolError as error:
                self.ask_again[node] = time.monotonic() + patience
                if node in replies:
                    self.refused[node] = str(error)
                self.warn(str(error))
                continue
            name = str(about["name"])
            self.nodes[name] = node
            self.refused.pop(node, None)
            (self.without_rad.discard if about.pop("has_rad", False) else self.without_rad.add)(name)
            facts.append(about)
        for about in sorted(facts, key=lambda fact: str(fact["name"])):
            self.listen({"event": "joined", **about})

    def introduced(self, reply: Message | None) -> dict[str, Scalar]:
        """What a node says of itself."""
        if reply is None:
            raise ProtocolError("a node did not say its name in time; it is asked again later.")
        if reply.has_error():
            raise ProtocolError(f"a node cannot take part: {_error_text(reply)}.")
        said = settings_of(reply.content)
        check_header(header_of(said), self.header(0), "a new node")
        name = str(said.get("name"))
        if not NAME.fullmatch(name):
            raise ProtocolError(f"a node calls itself {name[:64]!r}, expected letters, digits, '-', '_' or '.'.")
        if name in self.nodes:
            raise ProtocolError(f"a second node calls itself '{name}'. Give each node a name of its own.")
        return {key: said[key] for key in ("name", "encoder", "parameters", "examples", "has_rad") if key in said}

    def header(self, number: int) -> Header:
        return Header(self.federation, number, self.rad_digest)

    def settings(self, number: int) -> dict[str, Scalar]:
        """What every instruction of a round says."""
        return {**asdict(self.header(number)), "config": self.config_toml}

    def exchange(
        self, kind: str, number: int, contents: Mapping[ClientId, RecordDict]
    ) -> tuple[dict[ClientId, Message], dict[ClientId, int]]:
        """Send each client its content; return the replies that came in time, and the bytes sent.

        The RAD goes along to those that lack it, once; a node that lost it says so and is sent everything again.
        """
        deadline = time.monotonic() + self.config.engine.round_timeout
        replies: dict[ClientId, Message] = {}
        sent: dict[ClientId, int] = dict.fromkeys(contents, 0)
        asked = list(contents)
        for _ in range(2):
            messages = {}
            for name in asked:
                content, node = contents[name], self.nodes[name]
                content = with_rad(content, self.rad) if name in self.without_rad else content
                messages[node] = Message(content, node, kind, group_id=str(number))
                sent[name] += check_size(messages[node], self.config.engine.message_mb, "the server")
            answers = self.send(messages, deadline, dict(zip(messages, asked, strict=True)))
            replies |= {name: answers[self.nodes[name]] for name in asked if self.nodes[name] in answers}
            asked = [name for name in asked if name in replies and _needs_rad(replies[name])]
            self.without_rad -= {name for name, reply in replies.items() if not reply.has_error()}
            self.without_rad |= set(asked)
            if not asked:
                break
        return replies, sent

    def send(
        self, messages: Mapping[int, Message], deadline: float, names: Mapping[int, ClientId] | None = None
    ) -> dict[int, Message]:
        """Replies by node, keyed through the id of the message each answers (a reply's own sender can be wrong)."""
        waiting = dict(zip(self.grid.push_messages(messages.values()), messages, strict=True))
        replies: dict[int, Message] = {}
        in_time = True
        while waiting and in_time:
            in_time = time.monotonic() < deadline  # looked at before the replies: what has come by then counts
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    replies[node] = reply
                    if names:
                        self.listen({"event": "answered", "round": self.number, "client": names[node]})
        if waiting and hasattr(self.grid, "cancel"):  # too late now: our own engine can stop the work as well
            self.grid.cancel(set(waiting))
        return replies

    def accept(self, state: ServerState, name: ClientId, reply: Message | None, number: int) -> tuple[Update, int]:
        """A reply that may be used and its bytes, or a ProtocolError that says why not."""
        if reply is None:
            raise ProtocolError(f"{name} did not answer within {self.config.engine.round_timeout:g} s.")
        if reply.has_error():
            raise ProtocolError(f"{name} failed: {_error_text(reply)}.")
        size = check_size(reply, self.config.engine.message_mb, name)
        try:
            update = read_update(reply.content, self.header(number), name)
        except ProtocolError as error:
            raise ProtocolError(f"{name} sent a reply that cannot be used: {error}") from None
        self.method.check(state, name, update)
        return update, size

    def warn(self, text: str) -> None:
        self.listen({"event": "warning", "round": self.number, "text": text})

    # --- figures ---

    def evaluate(self, number: int, split: str, export: bool = False) -> Event:
        settings: dict[str, Scalar] = {**self.settings(number), "split": split, "export": export}
        self.listen({"event": "evaluating", "round": number, "split": split})
        asked = sorted(self.nodes)
        replies, _ = self.exchange("evaluate", number, {name: pack(settings=settings) for name in asked})
        scores = {}
        for name in asked:
            try:
                scores[name] = self.figures(name, replies.get(name), number)
            except ProtocolError as error:
                self.warn(f"{name} could not be evaluated: {error}")
        event = {"event": "evaluation", "round": number, "split": split, "clients": scores, "mean": _means(scores)}
        self.listen(event)
        return event

    def figures(self, name: ClientId, reply: Message | None, number: int) -> dict[str, float]:
        if reply is None:
            raise ProtocolError("no answer in time.")
        if reply.has_error():
            raise ProtocolError(f"{_error_text(reply)}.")
        return read_figures(reply.content, self.header(number), name)

    def evaluate_shared(self, number: int, weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The model for all, probed by the first client that can: on all classes, since it belongs to nobody."""
        settings: dict[str, Scalar] = {**self.settings(number), "split": "test"}
        for name in sorted(self.nodes):
            replies, _ = self.exchange("evaluate", number, {name: pack(weights, settings)})
            try:
                found = self.figures(name, replies.get(name), number)
            except ProtocolError as error:
                self.warn(f"{name} could not evaluate the global model: {error}")
                continue
            return {key: value for key, value in found.items() if key.endswith("_all")}
        raise RunError(
            "the global model could not be evaluated by anybody. All training is kept; mend the reasons above and "
            f"continue with: {resume_command(self.folder.path)}"
        )

    def summary(self, state: ServerState, updates: Mapping[ClientId, Update], seconds: float) -> Event:
        means = _means({name: dict(update.metrics) for name, update in updates.items()})
        event: Event = {"event": "round", "round": state.round, "replies": len(updates), "seconds": round(seconds, 3)}
        away = [name for name in state.roster if name not in self.nodes]
        if away:
            event["away"] = away
        figures = self.method.metrics(state)
        rank = figures.get("consensus_effective_rank", float("inf"))
        if rank < POOR_RANK:
            text = f"the clients agree on {rank:.1f} directions only, which teaches little: see docs/alignment.md"
            self.warn(text)
        return {**event, **means, **figures}

    def finish(self, state: ServerState) -> None:
        """During a run the test images are looked at here and nowhere else."""
        final = self.evaluate(state.round, "test", export=True)
        untrained = self.evaluate(0, "test") if self.config.evaluation.untrained else None
        missing = [name for event in (final, untrained) if event for name in self.nodes if name not in event["clients"]]
        if missing and self.folder.simulated:  # where clients are others' machines, none of them may hold up the end
            raise RunError(
                f"{', '.join(sorted(set(missing)))} could not be evaluated at the end; all training is kept. "
                f"Mend the reason above and continue with: {resume_command(self.folder.path)}"
            )
        results: dict[str, Any] = {
            "method": self.config.method,
            "round": state.round,
            "seed": self.config.seed,
            "clients": final["clients"],
            "mean": final["mean"],
            "sd_over_clients": _deviations(final["clients"]),
            "untrained": untrained["clients"] if untrained else {},
        }
        absent = sorted(set(state.roster) - set(final["clients"]))
        if absent:  # a node that left keeps its own model; its figures are unknown
            results["absent"] = absent
        shared = self.method.global_model(state)
        if shared:
            results["global"] = self.evaluate_shared(state.round, shared)
        self.folder.write_json("results.json", results)
        self.listen({"event": "finished", "round": state.round, **results})

    # --- the state on disk ---

    def save(self, state: ServerState) -> None:
        tensors = {f"shared/{key}": value for key, value in state.shared.items()}
        for name, kept in state.clients.items():
            tensors |= {f"client/{name}/{key}": value for key, value in kept.items()}
        about = {"round": state.round, "roster": state.roster, "examples": dict(state.examples)}
        save_tensors(self.folder.path / "server.safetensors", tensors, about)

    def restore(self) -> ServerState | None:
        path = self.folder.path / "server.safetensors"
        if not path.exists():
            return None
        tensors, about = load_tensors(path)
        shared: dict[str, torch.Tensor] = {}
        clients: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            owner, _, rest = key.partition("/")
            if owner == "shared":
                shared[rest] = value
            else:
                name, _, entry = rest.partition("/")
                clients.setdefault(name, {})[entry] = value
        return ServerState(about["round"], tuple(about["roster"]), shared, clients, about["examples"])


def _needs_rad(reply: Message) -> bool:
    return not reply.has_error() and settings_of(reply.content).get("need") == "rad"


def _error_text(reply: Message) -> str:
    """The client's own words, in one line of bounded length: they go into logs and on screens."""
    said = (reply.error.reason or "").strip().splitlines()
    reason = "".join(c for c in said[-1] if c.isprintable())[:400] if said else "no reason given"
    return f"{reason} (Flower error {reply.error.code})"


def _deviations(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Sample standard deviation over clients of each figure."""
    keys = sorted({key for values in scores.values() for key in values})
    columns = {key: [v[key] for v in scores.values() if key in v] for key in keys}
    return {key: stdev(column) for key, column in columns.items() if len(column) > 1}


def _means(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    keys = sorted({key for values in scores.values() for key in values})
    return {
        key: sum(v[key] for v in scores.values() if key in v) / sum(key in v for v in scores.values()) for key in keys
    }

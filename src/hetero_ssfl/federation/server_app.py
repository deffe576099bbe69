"""The server's side: one loop for every method and every engine.

1. hello      ask each node its name (node ids are random, names are not);
2. opening    where the method wants it, all clients or the first answer once, untrained;
3. rounds     sample clients by name, broadcast, wait for replies up to a deadline, check, aggregate, save;
4. the end    every client is probed on the test images, once, and keeps its encoder as a model.

The state saved after a round is its commit point: a run killed anywhere goes on from there and ends with the same bits.
"""

import time
from collections.abc import Callable, Mapping
from statistics import stdev
from typing import Any

import torch
from flwr.app import Message
from flwr.serverapp import Grid

from ..config import Config
from ..errors import ProtocolError, RunError
from ..methods import ClientId, Method, ServerState, Update, method_for
from ..runs import RunFolder, load_tensors, resume_command, save_tensors
from ..seeding import rng_for
from .records import Scalar, encoded_size, metrics_of, pack, pack_broadcast, read_update, settings_of

Event = dict[str, Any]
Listener = Callable[[Event], None]

COLLAPSED = 0.1  # feature spread: 1 is isotropic, 0 a single point
POOR_RANK = 3.0  # effective rank of the consensus


class Server:
    def __init__(self, grid: Grid, folder: RunFolder, config: Config, listen: Listener) -> None:
        self.grid, self.folder, self.config, self.listen = grid, folder, config, listen
        self.method: Method = method_for(config)
        self.config_toml = config.to_toml()
        self.nodes: dict[ClientId, int] = {}

    # --- the loop ---

    def run(self) -> None:
        roster = self.hello()
        state = self.restore() or ServerState(0 if self.method.opening == "nobody" else -1, roster)
        self.folder.forget_events_after(state.round)
        self.listen({"event": "start", "round": max(0, state.round), "rounds": self.config.rounds, "clients": roster})
        if state.round <= 0 and self.config.evaluation.every and not self.folder.events():
            self.folder.append_events([self.evaluate(0, "validation")])
        if state.round < 0:
            state = self.play(state, roster if self.method.opening == "all" else roster[:1])
        while state.round < self.config.rounds:
            state = self.play(state, self.sample(state))
        self.finish(state)

    def play(self, state: ServerState, selected: tuple[ClientId, ...]) -> ServerState:
        """One round, from broadcast to the saved state."""
        number, started = state.round + 1, time.perf_counter()
        self.listen({"event": "begin", "round": number, "clients": selected})
        contents = {name: pack_broadcast(self.method.broadcast(state, name), self.config_toml) for name in selected}
        replies, sent = self.exchange("train", number, contents)
        updates, events = {}, []
        for name in selected:
            event = {"event": "client", "round": number, "client": name, "bytes_down": sent[name]}
            try:
                update = self.accept(state, name, replies.get(name))
            except ProtocolError as error:
                events.append({**event, "excluded": str(error)})
                self.listen({"event": "warning", "round": number, "text": str(error)})
                continue
            updates[name] = update
            event |= {"bytes_up": encoded_size(replies[name]), "examples": update.examples, **update.metrics}
            if update.metrics.get("spread", 1.0) < COLLAPSED:
                event["warning"] = f"features have collapsed (spread {update.metrics['spread']:.3f})"
                self.listen({"event": "warning", "round": number, "text": f"{name}: {event['warning']}"})
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
        wanted = self.config.clients.selected_per_round()
        rng = rng_for(self.config.seed, "sample", state.round + 1)
        chosen = torch.randperm(len(state.roster), generator=rng)[:wanted].sort().values
        return tuple(state.roster[int(k)] for k in chosen)

    def due(self, number: int) -> bool:
        every = self.config.evaluation.every
        return bool(every) and (number % every == 0 or number == self.config.rounds)

    # --- talking to clients ---

    def hello(self) -> tuple[ClientId, ...]:
        """Learn every node's name; wait, within the round's deadline, until all clients are there."""
        deadline = time.monotonic() + self.config.engine.round_timeout
        expected = self.config.clients.count
        facts: list[Event] = []
        while len(self.nodes) < expected:
            unknown = [node for node in self.grid.get_node_ids() if node not in self.nodes.values()]
            content = pack(settings={"config": self.config_toml})
            for node, reply in self.send({n: Message(content, n, "query") for n in unknown}, deadline).items():
                if reply.has_error():
                    raise RunError(f"a client could not start: {_error_text(reply)}. Mend it and try again.")
                about = settings_of(reply.content)
                self.nodes[str(about["name"])] = node
                facts.append({"event": "joined", **about})
            if len(self.nodes) < expected:
                if time.monotonic() > deadline:
                    raise RunError(f"only {len(self.nodes)} of {expected} clients answered in time. Start the others.")
                time.sleep(0.1)
        for fact in sorted(facts, key=lambda f: str(f["name"])):
            self.listen(fact)
        return tuple(sorted(self.nodes))

    def exchange(
        self, kind: str, number: int, contents: Mapping[ClientId, Any]
    ) -> tuple[dict[ClientId, Message], dict[ClientId, int]]:
        """Send each client its content; return the replies that came in time, and the bytes sent."""
        deadline = time.monotonic() + self.config.engine.round_timeout
        messages = {
            self.nodes[name]: Message(content, self.nodes[name], kind, group_id=str(number))
            for name, content in contents.items()
        }
        replies = self.send(messages, deadline)
        names = {self.nodes[name]: name for name in contents}
        sent = {names[node]: encoded_size(message) for node, message in messages.items()}
        return {names[node]: reply for node, reply in replies.items()}, sent

    def send(self, messages: Mapping[int, Message], deadline: float) -> dict[int, Message]:
        """Replies by node, keyed through the id of the message each answers (a reply's own sender can be wrong)."""
        waiting = dict(zip(self.grid.push_messages(messages.values()), messages, strict=True))
        replies: dict[int, Message] = {}
        while waiting and time.monotonic() < deadline:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    replies[node] = reply
        if waiting and hasattr(self.grid, "cancel"):  # too late now: our own engine can stop the work as well
            self.grid.cancel(set(waiting))
        return replies

    def accept(self, state: ServerState, name: ClientId, reply: Message | None) -> Update:
        """A reply that may be used, or a ProtocolError that says why not."""
        if reply is None:
            raise ProtocolError(f"{name} did not answer within {self.config.engine.round_timeout:g} s.")
        if reply.has_error():
            raise ProtocolError(f"{name} failed: {_error_text(reply)}.")
        update = read_update(reply.content, name)
        self.method.check(state, name, update)
        return update

    # --- figures ---

    def evaluate(self, number: int, split: str, export: bool = False) -> Event:
        settings: dict[str, Scalar] = {"config": self.config_toml, "round": number, "split": split, "export": export}
        self.listen({"event": "evaluating", "round": number, "split": split})
        replies, _ = self.exchange("evaluate", number, {name: pack(settings=settings) for name in sorted(self.nodes)})
        scores = {}
        for name in sorted(self.nodes):
            reply = replies.get(name)
            if reply is None or reply.has_error():
                reason = "no answer in time" if reply is None else _error_text(reply)
                self.listen({"event": "warning", "round": number, "text": f"{name} could not be evaluated: {reason}"})
                continue
            scores[name] = metrics_of(reply.content)
        event = {"event": "evaluation", "round": number, "split": split, "clients": scores, "mean": _means(scores)}
        self.listen(event)
        return event

    def evaluate_shared(self, number: int, weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The model for all, probed by the first client: on all classes, since it belongs to nobody."""
        name = min(self.nodes)
        settings: dict[str, Scalar] = {"config": self.config_toml, "round": number, "split": "test", "export": False}
        replies, _ = self.exchange("evaluate", number, {name: pack(weights, settings)})
        if name not in replies or replies[name].has_error():
            reason = _error_text(replies[name]) if name in replies else "no answer in time"
            raise RunError(
                f"the global model could not be evaluated: {reason}. All training is kept; mend it and continue with: "
                f"{resume_command(self.folder.path)}"
            )
        return {key: value for key, value in metrics_of(replies[name].content).items() if key.endswith("_all")}

    def summary(self, state: ServerState, updates: Mapping[ClientId, Update], seconds: float) -> Event:
        means = _means({name: dict(update.metrics) for name, update in updates.items()})
        event = {"event": "round", "round": state.round, "replies": len(updates), "seconds": round(seconds, 3)}
        figures = self.method.metrics(state)
        rank = figures.get("consensus_effective_rank", float("inf"))
        if rank < POOR_RANK:
            text = f"the clients agree on {rank:.1f} directions only, which teaches little: see docs/alignment.md"
            self.listen({"event": "warning", "round": state.round, "text": text})
        return {**event, **means, **figures}

    def finish(self, state: ServerState) -> None:
        """During a run the test images are looked at here and nowhere else."""
        final = self.evaluate(state.round, "test", export=True)
        untrained = self.evaluate(0, "test") if self.config.evaluation.untrained else None
        missing = [name for event in (final, untrained) if event for name in self.nodes if name not in event["clients"]]
        if missing:
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


def _error_text(reply: Message) -> str:
    reason = (reply.error.reason or "no reason given").strip().splitlines()[-1]
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

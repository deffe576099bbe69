"""The connected nodes by name."""

import time
from dataclasses import replace

from flwr.app import Message
from flwr.serverapp import Grid

from ... import __version__
from ...config import Config
from ...errors import ProtocolError, RunError
from ...methods import ClientId, ServerState
from ...privacy.sums.rules import MIN_PARTICIPANTS
from ...runs.events import Joined, Left, Listener
from ...runs.folder import RunFolder, resume_command
from ..wire import NAME, check_header, check_size, check_version, fields_of
from .messenger import Messenger, error_text
from .seats import NoSeatError, Seats


class Roster(Messenger):
    """Knows which nodes are connected, and under which names they take part."""

    def __init__(self, grid: Grid, folder: RunFolder, config: Config, listen: Listener) -> None:
        super().__init__(grid, folder, config, listen)
        self.seats = Seats(config.clients) if self.may_be_away else None
        self.seen: dict[ClientId, int] = {}  # the last round in which each client was connected
        self.refused: dict[int, str] = {}  # connected nodes that cannot take part, and why
        self.silent: set[int] = set()  # connected nodes that did not answer in time
        self.ask_again: dict[int, float] = {}  # when to ask nodes again that did not introduce themselves correctly

    def gather(self, state: ServerState | None) -> None:
        """Wait until all clients of the config are connected. A resumed run continues without missing ones."""
        patience = self.config.engine.round_timeout if state is None else self.config.engine.join_timeout
        deadline = time.monotonic() + patience
        expected = self.config.clients.count if state is None else len(state.roster)
        if self.seats and state is not None:
            self.seats.holders = {name: state.seats.get(name) for name in state.roster}
        self.hello()
        while len(self.ids) < expected and time.monotonic() < deadline:
            if len(self.ids) + len(self.refused) >= expected and (state is None or not self.may_be_away):
                raise RunError(f"{next(iter(self.refused.values()))} Fix this and try again.")
            time.sleep(0.2)
            self.hello()
        if len(self.ids) >= expected:
            return
        if state is None or len(self.ids) < self.config.engine.min_replies:
            raise RunError(self.too_few(expected))
        missing = sorted(set(state.roster) - set(self.ids))
        self.warn(f"{', '.join(missing)} did not reconnect; the run continues without them.")

    def welcome(self, state: ServerState) -> ServerState:
        """Before a round, add new nodes to the roster and wait until enough nodes are connected."""
        deadline = time.monotonic() + self.config.engine.round_timeout
        needed = max(self.config.engine.min_replies, MIN_PARTICIPANTS if self.config.privacy.secure else 1)
        self.hello()
        while len(self.ids) < needed and time.monotonic() < deadline:
            time.sleep(1.0)
            self.hello()
        if len(self.ids) < needed:
            raise RunError(f"{self.too_few(needed)} Then continue with: {resume_command(self.folder.path)}")
        newcomers = tuple(sorted(set(self.ids) - set(state.roster)))
        # Newcomers are appended, so that known clients keep their positions.
        return replace(state, roster=(*state.roster, *newcomers), seats=self.held())

    def too_few(self, expected: int) -> str:
        """Say who is missing: nodes that are connected and did not answer in time, or are not connected at all."""
        engine = self.config.engine
        limit = min(("join_timeout", "round_timeout"), key=lambda key: getattr(engine, key))
        silent, away = len(self.silent), expected - len(self.ids) - len(self.silent) - len(self.refused)
        late = f"{silent} connected nodes did not answer within engine.{limit} = {getattr(engine, limit):g} s: raise it"
        parts = [f"only {len(self.ids)} of {expected} nodes have reported their names."]
        parts += [f"{late} if they are slow, or look at their logs."] if silent else []
        parts += [f"{away} nodes are not connected: start them."] if away > 0 else []
        parts += list(self.refused.values())[:1]
        return " ".join(parts)

    def held(self) -> dict[ClientId, int]:
        """Return the node that holds each name, as far as known."""
        return {name: node for name, node in self.seats.holders.items() if node is not None} if self.seats else {}

    def gone(self, state: ServerState) -> list[ClientId]:
        """Return the clients that have been disconnected for `clients.absent_rounds` rounds, or since a restart."""
        most = self.config.clients.absent_rounds
        for name in state.roster:
            if name in self.ids or name not in self.seen:
                self.seen[name] = state.round
        return [name for name in state.roster if self.seats and most and state.round - self.seen[name] >= most]

    def hello(self) -> None:
        """Ask every new node for its name, and remove nodes that disconnected."""
        connected = set(self.grid.get_node_ids())
        if self.seats and self.seats.reopen(connected):
            self.warn("all node ids are new (was the SuperLink's database reset?); names are assigned again.")
        for name in [name for name, node in self.ids.items() if node not in connected]:
            del self.ids[name]
            self.listen(Left(self.number, name))
        self.refused = {node: reason for node, reason in self.refused.items() if node in connected}
        self.silent &= connected
        now = time.monotonic()
        waiting = {node for node, until in self.ask_again.items() if until > now}
        unknown = connected - set(self.ids.values()) - waiting
        if not unknown:
            return
        content = self.content(0, version=__version__, channels=self.rad.shape[1], side=self.rad.shape[-1])
        messages = {node: Message(content, node, "query") for node in sorted(unknown)}
        replies: dict[int, Message] = {}
        self.send(messages, now + self.patience, replies.__setitem__)
        newcomers: list[Joined] = []
        self.silent = (self.silent - replies.keys()) | (unknown - replies.keys())
        for node in sorted(unknown):
            try:
                about = self.introduced(node, replies.get(node))
            except ProtocolError as error:
                self.ask_again[node] = time.monotonic() + self.patience
                if node in replies and not isinstance(error, NoSeatError):  # the run does not wait for strangers
                    self.refused[node] = str(error)
                self.warn(str(error))
                continue
            self.ids[about.name] = node
            self.about[about.name] = about
            self.refused.pop(node, None)
            newcomers.append(about)
        for about in sorted(newcomers, key=lambda about: about.name):
            self.listen(about)

    def introduced(self, node: int, reply: Message | None) -> Joined:
        """Read a node's introduction, and give the node its seat. Raise ProtocolError if it cannot take part."""
        if reply is None:
            raise ProtocolError("a node did not report its name in time; it will be asked again later.")
        if reply.has_error():
            raise ProtocolError(f"a node cannot take part: {error_text(reply)}.")
        check_size(reply, self.config.engine.message_mb, "a new node")
        check_header(reply.content, self.header(0), "a new node")
        fields = fields_of(reply.content)
        check_version(fields, f"node {str(fields.get('name'))[:64]!r}")
        name = str(fields.get("name"))
        if not NAME.fullmatch(name):
            raise ProtocolError(f"a node has the name {name[:64]!r}, expected letters, digits, '-', '_' or '.'.")
        if name in self.ids:
            raise ProtocolError(f"a second node has the name '{name}'. Give each node a unique name.")
        if self.seats:
            self.seats.take(name, node)
        (self.without_rad.discard if fields.get("has_rad") is True else self.without_rad.add)(name)
        parameters, examples = (int(fields[k]) if type(fields.get(k)) is int else 0 for k in ("parameters", "examples"))
        return Joined(name, str(fields.get("encoder"))[:200], parameters, examples)

"""The connected nodes by name."""

import time
from dataclasses import replace

from flwr.app import Message
from flwr.serverapp import Grid

from ...config import Config
from ...errors import ProtocolError, RunError
from ...methods import ClientId, ServerState
from ...privacy.sums import MIN_PARTICIPANTS
from ...runs.events import Joined, Left, Listener
from ...runs.folder import RunFolder, resume_command
from ..wire import NAME, check_header, check_size, fields_of, header_of, pack
from .messenger import Messenger, error_text
from .seats import NoSeatError, Seats


class Roster(Messenger):
    """Knows which nodes are connected, and under which names they take part."""

    def __init__(self, grid: Grid, folder: RunFolder, config: Config, listen: Listener) -> None:
        super().__init__(grid, folder, config, listen)
        self.seats = Seats(config.clients) if self.may_be_away else None
        self.examples: dict[ClientId, int] = {}
        """The number of images that each client reported."""
        self.seen: dict[ClientId, int] = {}
        """The last round in which each client was connected."""
        self.refused: dict[int, str] = {}  # connected nodes that cannot take part, and why
        self.ask_again: dict[int, float] = {}  # when to ask nodes again that did not introduce themselves correctly

    # --- connected nodes ---

    def gather(self, state: ServerState | None) -> None:
        """Wait until all clients of the config are connected. A resumed run continues without missing ones."""
        patience = self.config.engine.round_timeout if state is None else self.config.engine.join_timeout
        deadline = time.monotonic() + patience
        expected = self.config.clients.count if state is None else len(state.roster)
        if self.seats and state is not None:
            self.seats.restore(state.roster, state.seats)
        while True:
            self.hello()
            if len(self.ids) >= expected:
                return
            may_continue_without = state is not None and self.may_be_away
            if len(self.ids) + len(self.refused) >= expected and not may_continue_without:
                raise RunError(f"{next(iter(self.refused.values()))} Fix this and try again.")
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if state is None or len(self.ids) < self.config.engine.min_replies:
            raise RunError(f"only {len(self.ids)} of {expected} clients connected in time. Start the others.")
        missing = sorted(set(state.roster) - set(self.ids))
        self.warn(f"{', '.join(missing)} did not reconnect; the run continues without them.")

    def welcome(self, state: ServerState) -> ServerState:
        """Before a round, add new nodes to the roster and wait until enough nodes are connected."""
        deadline = time.monotonic() + self.config.engine.round_timeout
        self.hello()
        needed = max(self.config.engine.min_replies, MIN_PARTICIPANTS if self.config.privacy.secure else 1)
        while len(self.ids) < needed:
            if time.monotonic() > deadline:
                raise RunError(
                    f"only {len(self.ids)} nodes are connected, expected at least {needed}. "
                    f"Start the others and continue with: {resume_command(self.folder.path)}"
                )
            time.sleep(1.0)
            self.hello()
        newcomers = tuple(sorted(set(self.ids) - set(state.roster)))
        # Newcomers are appended, so that known clients keep their positions.
        return replace(state, roster=(*state.roster, *newcomers), seats=self.held())

    def held(self) -> dict[ClientId, int]:
        """Return the node that holds each name, as far as known."""
        holders = self.seats.holders if self.seats else {}
        return {name: node for name, node in holders.items() if node is not None}

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
        now = time.monotonic()
        waiting = {node for node, until in self.ask_again.items() if until > now}
        unknown = connected - set(self.ids.values()) - waiting
        if not unknown:
            return
        channels, side = self.rad.shape[1], self.rad.shape[-1]
        content = pack(fields={**self.fields(0), "channels": channels, "side": side})
        messages = {node: Message(content, node, "query") for node in sorted(unknown)}
        patience = min(self.config.engine.join_timeout, self.config.engine.round_timeout)
        replies: dict[int, Message] = {}
        self.send(messages, now + patience, replies.__setitem__)
        newcomers: list[Joined] = []
        for node in sorted(unknown):
            try:
                about, has_rad = self.introduced(replies.get(node))
                if self.seats:
                    self.seats.take(about.name, node)
            except ProtocolError as error:
                self.ask_again[node] = time.monotonic() + patience
                if node in replies and not isinstance(error, NoSeatError):  # the run does not wait for strangers
                    self.refused[node] = str(error)
                self.warn(str(error))
                continue
            self.ids[about.name] = node
            self.models[about.name] = {"encoder": about.encoder, "parameters": about.parameters}
            self.examples[about.name] = about.examples
            self.refused.pop(node, None)
            (self.without_rad.discard if has_rad else self.without_rad.add)(about.name)
            newcomers.append(about)
        for about in sorted(newcomers, key=lambda newcomer: newcomer.name):
            self.listen(about)

    def introduced(self, reply: Message | None) -> tuple[Joined, bool]:
        """Read a node's introduction. Return it, and whether the node has the RAD."""
        if reply is None:
            raise ProtocolError("a node did not report its name in time; it will be asked again later.")
        if reply.has_error():
            raise ProtocolError(f"a node cannot take part: {error_text(reply)}.")
        check_size(reply, self.config.engine.message_mb, "a new node")
        fields = fields_of(reply.content)
        check_header(header_of(fields), self.header(0), "a new node")
        name = str(fields.get("name"))
        if not NAME.fullmatch(name):
            raise ProtocolError(f"a node has the name {name[:64]!r}, expected letters, digits, '-', '_' or '.'.")
        if name in self.ids:
            raise ProtocolError(f"a second node has the name '{name}'. Give each node a unique name.")
        parameters, examples = (int(fields[k]) if type(fields.get(k)) is int else 0 for k in ("parameters", "examples"))
        return Joined(name, str(fields.get("encoder"))[:200], parameters, examples), fields.get("has_rad") is True

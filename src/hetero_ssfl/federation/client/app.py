"""The participant's side, as a Flower ClientApp. Images never leave it; weights only with methods that average them."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from torch import Tensor

from ... import __version__
from ...config import Config, parse_config
from ...errors import ConfigError, DivergedError, LostStateError, ProtocolError
from ...learning.learner import Learner
from ...methods import Broadcast, method_class, method_for
from ...methods.base import check_finite
from ...methods.capabilities import Noise, SecureSums
from ...plugins import remember
from ...runs.folder import RunFolder
from .. import wire
from ..logs import log_to_file, log_to_stderr
from ..participants import LocalSite, Site
from ..participants.limits import check_text
from ..participants.node import RadMissingError, answer_request
from ..participants.node_settings import NodeSettings, read_node
from ..participants.participant import Participant
from ..wire import Header, Scalar
from .budget import Budget, keep_metrics
from .faults import full_text, public_text
from .memory import ClientCache
from .scoring import evaluate, export_model, floor_metrics
from .sums import Summing

log = logging.getLogger(__name__)

PAUSE = 60.0  # seconds between two lines about the steps of a round
SPLITS = ("validation", "test")
CODES: dict[type[Exception], int] = {DivergedError: wire.DIVERGED, LostStateError: wire.LOST_STATE}

read_config = lru_cache(maxsize=8)(parse_config)

Report = Callable[[str, float, float], None]
"""Called with a client's name, the fraction of its round that is done, and its loss."""


@dataclass
class ClientProcess:
    """The state that one process keeps between messages. It is created where the process starts."""

    site: Site = field(default_factory=LocalSite)  # of a run on this machine; forked workers share a program's objects
    run_dir: Path | None = None  # the run folder of all participants, if the engine cannot tell each node (Ray)
    threads: int | None = None  # the number of torch threads, if the engine does not set it (Ray)
    report: Report = lambda *_: None
    home: Path | None = None  # of the node that this process last worked for, where its faults are recorded
    clients: ClientCache = field(default_factory=ClientCache)
    _settings: dict[Path, NodeSettings] = field(default_factory=dict)  # read once: restart the process to change them

    def settings(self, node: Mapping[str, Any]) -> NodeSettings | None:
        """Return the node settings that a node config refers to; None for a participant of a run on this machine."""
        if not node.get("settings"):
            return None
        path = Path(str(node["settings"]))
        if path not in self._settings:
            self._settings[path] = read_node(path)
        settings = self._settings[path]
        torch.set_num_threads(settings.threads)  # a process may serve several nodes
        log_to_stderr(settings.name)
        if self.home != settings.home:
            log_to_file(settings.name, settings.home / "node.log")
        self.home = settings.home
        return settings

    def participant(self, node: Mapping[str, Any], config: Config) -> Participant:
        """Return the participant of a run on this machine that a node config refers to."""
        run_dir, number = node.get("run-dir") or self.run_dir, node.get("number", node.get("partition-id"))
        if not run_dir or number is None:
            raise ProtocolError("this node has no settings. Start it with node-config 'settings=\"node.toml\"'.")
        if self.threads:
            torch.set_num_threads(self.threads)
        return self.site.participant(RunFolder(Path(str(run_dir))), int(number), config)


@dataclass(frozen=True)
class Instruction:
    """A parsed message that is within the participant's limits, and the participant."""

    header: Header
    fields: Mapping[str, Scalar]
    content: RecordDict
    context: Context
    participant: Participant

    @cached_property
    def arrays(self) -> Mapping[str, Tensor]:
        return wire.arrays_of(self.content)

    @property
    def summing(self) -> Summing:
        """The secure sum that the message belongs to."""
        if not self.participant.config.privacy.secure:
            raise ProtocolError("the server asks for a secure sum, but its config has privacy.secure = false.")
        return Summing(self.participant, wire.session_of(self.header, self.fields), self.context)

    @property
    def starts_after(self) -> int | None:
        """The round of the state to start from, if the server knows it; 0 for an untrained client."""
        number = self.fields.get("starts_after")
        return number if type(number) is int and 0 <= number <= self.header.round else None


def receive(process: ClientProcess, message: Message, context: Context) -> Instruction:
    """Check the message against the participant's limits, parse it, and open the participant."""
    settings, fields = process.settings(context.node_config), wire.fields_of(message.content)
    if settings:  # before anything in the message is parsed
        wire.check_size(message, settings.limits.message_mb, "the server")
        check_text(settings.limits, str(fields.get("config")))
    header = wire.header_of(fields)
    wire.check_version(fields, "the server")  # before its config, which a newer version may write otherwise
    try:
        config = read_config(str(fields.get("config")), origin="the server's config")
    except ConfigError as error:
        raise ProtocolError(f"the server's config is not possible here: {error}") from None
    hello = message.metadata.message_type == "query"
    shape = (fields.get("channels"), fields.get("side")) if hello else None
    if settings:
        participant = answer_request(settings, config, header, shape, wire.rad_of(message.content))
    else:
        participant = process.participant(context.node_config, config)
    remember([participant.model.encoder])
    return Instruction(header, fields, message.content, context, participant)


def client_app(process: ClientProcess) -> ClientApp:
    app = ClientApp()

    def answering(handle: Callable[[Instruction], RecordDict]) -> Callable[[Message, Context], Message]:
        """Turn any exception of a handler into an error reply (faults.py): Flower would send its whole text."""

        def answer(message: Message, context: Context) -> Message:
            try:
                asked = receive(process, message, context)
                content = handle(asked)
                log.info("round %d, %s: sends %s", asked.header.round, message.metadata.message_type, sizes_of(content))
                return Message(content, reply_to=message)
            except RadMissingError:
                return Message(wire.pack(fields={"need": "rad"}), reply_to=message)
            except Exception as error:
                node = context.node_config
                local = not node.get("settings") and (process.run_dir or node.get("run-dir"))  # no owner of its own
                reason = full_text(error) if local else public_text(error, process.home)
                code = CODES.get(type(error), ErrorCode.CLIENT_APP_RAISED_EXCEPTION)
                return Message(Error(code, reason), reply_to=message)

        return answer

    app.query()(answering(introduce))
    app.train()(answering(partial(train, process)))
    app.evaluate()(answering(partial(score, process)))
    app.query("keys")(answering(lambda asked: asked.summing.keys(wire.pack(header=asked.header))))
    app.query("shares")(answering(lambda asked: asked.summing.shares(asked.content, wire.pack(header=asked.header))))
    app.query("confirm")(answering(lambda asked: asked.summing.confirm(asked.content, wire.pack(header=asked.header))))
    app.query("unmask")(answering(lambda asked: asked.summing.unmask(asked.content, wire.pack(header=asked.header))))
    return app


def introduce(asked: Instruction) -> RecordDict:
    """Reply with the participant's name and model. Flower's node ids are random, names are stable."""
    participant = asked.participant
    facts: dict[str, Scalar] = {
        "name": participant.name,
        "version": __version__,
        "encoder": participant.model.encoder,
        "parameters": participant.sizes[0],
        "examples": 0 if hides_metrics(participant.config) else len(participant.images),
        "has_rad": participant.has_rad,
    }
    return wire.pack(fields=facts, header=asked.header)


def train(process: ClientProcess, asked: Instruction) -> RecordDict:
    """Train one round: load the previous state, train, save the new state, reply."""
    participant, down = asked.participant, Broadcast(asked.header.round, asked.arrays)
    method, privacy = method_for(participant.config), participant.config.privacy
    summing = asked.summing if privacy.secure else None
    if summing:
        summing.check(asked.content)
    with participant.states.lock():
        budget = Budget(participant)
        budget.check()
        client = process.clients.get(participant, down.round - 1, asked.starts_after)
        log.info("round %d: training on %d samples", down.round, len(participant.images))
        report = log_progress(down.round, process.report) if process.home else process.report
        client.progress = partial(report, client.name)  # no closure over the client, which would keep it alive
        method.check_broadcast(client, down)
        try:
            update = method.local_update(client, down.to(client.device))
        except BaseException:
            process.clients.drop(participant)
            raise
        if down.round > 0:
            participant.states.save(down.round, client.learner.state_dict())
        budget.spend()
    log.info("round %d done: %s", down.round, dict(update.metrics))
    if hides_metrics(participant.config):
        keep_metrics(participant, down.round, update.metrics)
    if summing:
        assert isinstance(method, SecureSums)  # method_for has checked it
        return wire.pack_vector(asdict(asked.header), summing.masked(asked.content, method, update))
    if privacy.epsilon is not None:
        assert isinstance(method, Noise)
        update = method.with_noise(update)
    return wire.pack(update.arrays, {"examples": update.examples}, update.metrics, asked.header)


def score(process: ClientProcess, asked: Instruction) -> RecordDict:
    """Probe the encoder after a round. On the last evaluation, also export it as a model."""
    participant, number, split = asked.participant, asked.header.round, str(asked.fields.get("split"))
    if split not in SPLITS:
        raise ProtocolError(f"the message names the images '{split[:40]}', expected {' or '.join(SPLITS)}.")
    if "floor" in asked.fields:
        metrics = floor_metrics(participant, str(asked.fields["floor"]), split)
    elif asked.arrays:
        metrics = evaluate(participant, with_global_model(participant, asked.arrays), split)
    elif number == 0:
        metrics = evaluate(participant, participant.untrained(), split)
    else:
        client = process.clients.get(participant, number, asked.starts_after)
        metrics = evaluate(participant, client.learner, split)
        if asked.fields.get("export"):
            export_model(participant, client)
    return wire.pack(metrics=metrics, header=asked.header)


def log_progress(number: int, also: Report) -> Report:
    """Return a report for the log of a node, at most once a minute. It refers to no process, which keeps clients."""
    told = time.monotonic()

    def report(name: str, done: float, loss: float) -> None:
        nonlocal told
        if time.monotonic() - told > PAUSE:
            told = time.monotonic()
            log.info("round %d: %.0f %% of the steps done, loss %.4g", number, 100 * done, loss)
        also(name, done, loss)

    return report


def sizes_of(content: RecordDict) -> dict[str, str]:
    """Return form and bytes of each array of a reply, for the node's log."""
    arrays = [(name, array) for record in content.array_records.values() for name, array in record.items()]
    return {name: f"{array.dtype} {list(array.shape)}, {len(array.data)} bytes" for name, array in arrays}


def hides_metrics(config: Config) -> bool:
    """Tell whether a client keeps its losses and its number of images to itself."""
    return config.privacy.secure or config.privacy.epsilon is not None


def with_global_model(participant: Participant, weights: Mapping[str, Tensor]) -> Learner:
    """Return networks with weights from the server. Only methods that average weights have a use for them."""
    if not method_class(participant.config.method).averages_weights:
        raise ProtocolError(f"the server sent a global model, but method '{participant.config.method}' has none.")
    check_finite(weights, "the server")
    learner = participant.untrained()
    try:
        learner.load_state_dict({**learner.state_dict(), **weights})
    except RuntimeError:
        raise ProtocolError(f"the global model does not fit the networks of {participant.name}.") from None
    return learner


app = client_app(ClientProcess())  # the ClientApp that a SuperNode loads (`hetero_ssfl.federation.client.app:app`)

"""The participant's side, as a Flower ClientApp. Weights and images never leave it."""

import logging
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from pathlib import Path

import torch
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from torch import Tensor

from ..config import Config, parse_config
from ..errors import HeteroSSFLError, ProtocolError
from ..methods import Broadcast, method_for
from ..runs import RunFolder
from .given import site_of
from .logs import log_to_stderr
from .node import NodeSettings, find_rad, keep_rad, open_node, read_node
from .participant import ClientCache, Participant, evaluate, export_model
from .records import (
    Header,
    Scalar,
    arrays_of,
    check_size,
    header_of,
    pack,
    pack_reply,
    pack_update,
    rad_of,
    settings_of,
)
from .simulated import open_site, run_dir_of

log = logging.getLogger(__name__)
app = ClientApp()
clients = ClientCache()

Report = Callable[[str, float, float], None]
Handler = Callable[[Message, Context], Message]


class Progress:
    """Where a client's progress goes: (client, share of the round done, loss). Set by the engine."""

    report: Report = staticmethod(lambda *_: None)


class RadMissingError(Exception):
    """This participant has not got the RAD that the server names."""


def answering(handler: Handler) -> Handler:
    """What goes wrong here becomes one sentence in the reply, and in this node's own log."""

    @wraps(handler)
    def answer(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except RadMissingError:
            return Message(pack(settings={"need": "rad"}), reply_to=message)
        except (HeteroSSFLError, FloatingPointError, torch.OutOfMemoryError) as error:
            log.warning("refused: %s", error)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)

    return answer


# --- where the message is to be answered ---


def place(message: Message, context: Context) -> tuple[dict[str, Scalar], Header, Participant]:
    """The instruction's settings, where it belongs, and the participant that is meant."""
    settings = settings_of(message.content)
    header, config_toml = header_of(settings), str(settings.get("config"))
    config = _config(config_toml)
    torch.set_num_threads(config.engine.threads)  # part of the numbers, on every engine
    if "given" in context.node_config:
        run_dir, number = run_dir_of(context.node_config), int(context.node_config["given"])
        return settings, header, site_of(run_dir).participant(RunFolder(run_dir), number, config)
    if "settings" not in context.node_config:
        site = open_site(run_dir_of(context.node_config), config_toml)
        return settings, header, site.participant(int(context.node_config["partition-id"]))
    path = Path(str(context.node_config["settings"]))
    node = read_node(path)
    log_to_stderr(node.name)
    check_size(message, node.limits.message_mb, "the server")
    rad = _rad(node, header, message)
    return settings, header, open_node(path, config_toml, header.federation, rad)


@lru_cache(maxsize=8)
def _config(config_toml: str) -> Config:
    return parse_config(config_toml, origin="the server's config")


def _rad(node: NodeSettings, header: Header, message: Message) -> Tensor:
    sent = rad_of(message.content)
    if sent is not None:
        return keep_rad(node, header.rad, sent)
    kept = find_rad(node, header.rad)
    if kept is not None:
        return kept
    if message.metadata.message_type.startswith("query"):  # to say who it is, a node needs only the images' shape
        channels, side = (int(settings_of(message.content).get(key, 0)) for key in ("channels", "side"))
        if channels not in (1, 3) or not 1 <= side <= 4096:
            raise ProtocolError(f"the RAD is said to have {channels} channels of {side} pixels, which cannot be.")
        return torch.zeros(1, channels, side, side, dtype=torch.uint8)
    raise RadMissingError


# --- what a participant answers to ---


@app.query()
@answering
def hello(message: Message, context: Context) -> Message:
    """Who is there: node ids are random, names are not."""
    _, header, participant = place(message, context)
    facts: dict[str, Scalar] = {
        "name": participant.name,
        "encoder": participant.model.encoder,
        "parameters": participant.parameters,
        "examples": len(participant.images),
        "has_rad": len(participant.rad) > 1,
    }
    return Message(pack_reply(header, facts=facts), reply_to=message)


@app.train()
@answering
def train(message: Message, context: Context) -> Message:
    """One round: load the state before it, train, save the state after it, reply."""
    _, header, participant = place(message, context)
    down = Broadcast(header.round, arrays_of(message.content))
    with participant.states.lock():
        client = clients.get(participant, limit=down.round - 1)
        client.progress = partial(Progress.report, client.name)  # a closure over the client would keep it alive
        method = method_for(participant.config)
        method.check_broadcast(client, down)
        try:
            update = method.local_update(client, down.to(client.device))
        except BaseException:
            clients.drop(participant)
            raise
        if down.round > 0:
            participant.states.save(down.round, client.learner.state_dict())
    log.info("round %d done: %s", down.round, dict(update.metrics))
    return Message(pack_update(header, update), reply_to=message)


@app.evaluate()
@answering
def score(message: Message, context: Context) -> Message:
    """Probe the encoder as it is after a round; at the end also keep it as a model."""
    settings, header, participant = place(message, context)
    shared, split = arrays_of(message.content), str(settings.get("split"))
    if shared:  # the server's model for all, in networks of this client's kind
        learner = participant.untrained()
        try:
            learner.load_state_dict({**learner.state_dict(), **shared})
        except RuntimeError:
            raise ProtocolError(f"the global model does not fit the networks of {participant.name}.") from None
        metrics = evaluate(participant, learner, split)
    elif header.round == 0:
        metrics = evaluate(participant, participant.untrained(), split)
    else:
        client = clients.get(participant, header.round)
        metrics = evaluate(participant, client.learner, split)
        if settings.get("export"):
            export_model(participant, client)
    return Message(pack_reply(header, metrics=metrics), reply_to=message)

"""The participant's side, as a Flower ClientApp. Weights and images never leave it."""

from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ..methods import method_for
from ..models import count_parameters
from .records import Scalar, arrays_of, pack, pack_update, read_broadcast, settings_of
from .simulated import ClientCache, Site, client_name, evaluate, export_model, open_site

app = ClientApp()
clients = ClientCache()

Report = Callable[[str, float, float], None]


class Progress:
    """Where a client's progress goes: (client, share of the round done, loss). Set by the engine."""

    report: Report = staticmethod(lambda *_: None)


def _place(message: Message, context: Context) -> tuple[dict[str, Any], Site, int]:
    settings = settings_of(message.content)
    site = open_site(str(context.node_config["run-dir"]), str(settings["config"]))
    return settings, site, int(context.node_config["partition-id"])


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Who is there: node ids are random, names are not."""
    _, site, number = _place(message, context)
    learner = site.untrained(number)
    facts: dict[str, Scalar] = {
        "name": client_name(number),
        "encoder": site.config.model_of(number).encoder,
        "parameters": count_parameters(learner.encoder),
        "examples": len(site.rows[client_name(number)]),
    }
    return Message(pack(settings=facts), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round: load the state before it, train, save the state after it, reply."""
    _, site, number = _place(message, context)
    down = read_broadcast(message.content)
    client = clients.get(site, number, limit=down.round - 1)
    client.progress = lambda done, loss: Progress.report(client.name, done, loss)
    try:
        update = method_for(site.config).local_update(client, down)
    except BaseException:
        clients.drop(site, number)
        raise
    if down.round > 0:
        site.folder.save_client(client.name, down.round, client.learner.state_dict())
    return Message(pack_update(update), reply_to=message)


@app.evaluate()
def score(message: Message, context: Context) -> Message:
    """Probe the encoder as it is after a round; at the end also keep it as a model."""
    settings, site, number = _place(message, context)
    limit, shared = int(settings["round"]), arrays_of(message.content)
    if shared:  # the server's model for all, in networks of this client's kind
        learner = site.untrained(number)
        learner.load_state_dict({**learner.state_dict(), **shared})
        metrics = evaluate(site, number, learner, str(settings["split"]))
    elif limit == 0:
        metrics = evaluate(site, number, site.untrained(number), str(settings["split"]))
    else:
        client = clients.get(site, number, limit)
        metrics = evaluate(site, number, client.learner, str(settings["split"]))
        if settings["export"]:
            export_model(site, number, client)
    return Message(pack(metrics=metrics), reply_to=message)

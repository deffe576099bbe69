"""The methods by name. A new one is a subclass of `Method` in this table."""

import difflib

from ..config import Config
from ..errors import ConfigError
from .averaging import FedAvg, FedBYOL, FedSimSiam
from .base import Broadcast, ClientId, Method, ServerState, Update
from .fedema import FedEMA
from .fedu import FedU
from .hetero import HeteroSSFL
from .local import Local

METHODS: dict[str, type[Method]] = {m.name: m for m in (HeteroSSFL, Local, FedBYOL, FedSimSiam, FedU, FedEMA, FedAvg)}


def method_for(config: Config) -> Method:
    """The method a config names, if its models allow it."""
    kind = METHODS.get(config.method)
    if kind is None:
        near = difflib.get_close_matches(config.method, METHODS, n=1)
        hint = f"the nearest is '{near[0]}'; " if near else ""
        raise ConfigError(f"unknown method '{config.method}', {hint}expected one of {', '.join(METHODS)}.")
    if kind.ssl_kind and config.ssl.kind != kind.ssl_kind:
        raise ConfigError(
            f"method '{config.method}' is defined for ssl.kind = '{kind.ssl_kind}', not '{config.ssl.kind}'. "
            "Change ssl.kind, or the method (fedbyol and fedsimsiam are each other's counterpart)."
        )
    if kind.needs_labels and config.rad.in_ssl:
        raise ConfigError(
            f"method '{config.method}' trains on labels, which RAD images do not have. Set rad.in_ssl = false."
        )
    models = {config.model_of(k) for k in range(config.clients.count)}
    if kind.averages_weights and len(models) > 1:
        raise ConfigError(
            f"method '{config.method}' averages weights and needs equal models, but clients.models has {len(models)} "
            "different ones. Name one model, or use method = 'hetero-ssfl', which lets them differ."
        )
    return kind(config)


__all__ = ["METHODS", "Broadcast", "ClientId", "Method", "ServerState", "Update", "method_for"]

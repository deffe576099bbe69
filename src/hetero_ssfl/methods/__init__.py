"""Find methods by name: built-in, from installed packages (entry points), or a user's `package.module:Class`."""

import difflib
from importlib.metadata import entry_points

from ..config import Config
from ..errors import ConfigError
from ..plugins import find
from .averaging import FedAvg, FedBYOL, FedSimSiam, FedSSL
from .base import Broadcast, ClientId, Method, ServerState, Update
from .capabilities import GroupSums, Noise, SecureSums
from .fedema import FedEMA
from .fedu import FedU
from .hetero import HeteroSSFL
from .local import Local

METHODS: dict[str, type[Method]] = {
    m.name: m for m in (HeteroSSFL, Local, FedSSL, FedBYOL, FedSimSiam, FedU, FedEMA, FedAvg)
}


def method_names() -> list[str]:
    """Return the names of the built-in methods, and then of those that installed packages register."""
    return [*METHODS, *_installed()]


def _installed() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group="hetero_ssfl.methods")}


def method_class(name: str) -> type[Method]:
    """Return the class of a method."""
    if name in METHODS:
        return METHODS[name]
    installed = _installed()
    if name not in installed and ":" not in name:
        known = method_names()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"the nearest is '{near[0]}'; " if near else ""
        raise ConfigError(
            f"unknown method '{name}', {hint}expected one of {', '.join(known)}, or package.module:Class."
        )
    own = find(installed.get(name, name), "method")
    if not isinstance(own, type) or not issubclass(own, Method):
        raise ConfigError(
            f"method '{name}' is not a subclass of hetero_ssfl.Method. Derive it from Method or HeteroSSFL."
        )
    return own


def method_for(config: Config) -> Method:
    """Return the method of a config. Raises ConfigError if the other settings do not allow it."""
    kind, models = method_class(config.method), {config.model_of(k) for k in range(config.clients.count)}
    this, or_ours, privacy = f"method '{config.method}'", "or use method = 'hetero-ssfl'", config.privacy
    if kind.ssl_kind and config.ssl.kind != kind.ssl_kind:
        raise ConfigError(
            f"{this} is defined for ssl.kind = '{kind.ssl_kind}', not '{config.ssl.kind}'. "
            "Change ssl.kind, or use method = 'fedssl', which averages weights with any local loss."
        )
    if kind.needs_labels and config.rad.in_ssl:
        raise ConfigError(f"{this} trains on labels, which RAD images do not have. Set rad.in_ssl = false.")
    if privacy.secure and not issubclass(kind, SecureSums):
        needed = "needs each client's reply, which privacy.secure = true hides"
        raise ConfigError(f"{this} {needed}. Set privacy.secure = false, {or_ours}.")
    if privacy.groups > 1 and not issubclass(kind, GroupSums):
        one = "combines one sum of all clients"
        raise ConfigError(f"{this} {one}, not one per group. Set privacy.groups = 1, {or_ours}.")
    if privacy.epsilon is not None and not issubclass(kind, Noise):
        wanted = f"privacy.epsilon = {privacy.epsilon:g}"
        raise ConfigError(f"{this} has no noise, which {wanted} asks for. Leave privacy.epsilon out, {or_ours}.")
    if kind.averages_weights and len(models) > 1:
        raise ConfigError(
            f"{this} averages weights and needs equal models, but clients.models has {len(models)} different ones. "
            f"Use one model, {or_ours}, which supports different models."
        )
    return kind(config)

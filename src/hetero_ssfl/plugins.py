"""A user's own code, by name: `package.module:attribute` is imported; `given:NAME` was handed over in this process.

Configs hold and send names only. An object of a notebook or script has no name that another process could import, so
processes that need it are forked from the one that has it.

What a model's or a run's folder names may be another's choice. It is imported if the user has trained with it on this
machine, or says so: docs/threat-model.md.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain, count
from pathlib import Path
from typing import Any

from .errors import ConfigError

GIVEN = "given"
TRUST_VARIABLE = "HETERO_SSFL_TRUST"
_at_hand: ContextVar[Mapping[str, Any]] = ContextVar("objects that the current run was given", default={})  # noqa: B039


class Given:
    """Objects that one run was given, under the names that its config has for them."""

    def __init__(self) -> None:
        self.things: dict[str, Any] = {}
        self._specs: dict[int, str] = {}

    def spec(self, thing: Any, name: str | None = None, keep: Callable[[Any], Any] | None = None) -> str:
        """The name of a thing: what can be imported by that; else `name` or its own, and a number if two share it."""
        if id(thing) in self._specs:
            return self._specs[id(thing)]
        own = getattr(thing, "__qualname__", type(thing).__qualname__)
        module = getattr(thing, "__module__", None) or "__main__"
        if name is None and module != "__main__" and getattr(sys.modules.get(module), own, None) is thing:
            return f"{module}:{own}"
        name = name or own.replace("<locals>.", "").replace("<lambda>", "lambda")
        unique = next(n for n in chain([name], (f"{name}-{k}" for k in count(2))) if n not in self.things)
        self.things[unique] = keep(thing) if keep else thing
        self._specs[id(thing)] = f"{GIVEN}:{unique}"
        return self._specs[id(thing)]

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Within this block, and in processes forked from it, `find` knows these objects."""
        token = _at_hand.set(self.things)
        try:
            yield
        finally:
            _at_hand.reset(token)


def find(spec: str, what: str) -> Any:
    """The callable behind a name; `what` is the setting that named it."""
    module, _, name = spec.partition(":")
    if module == GIVEN:
        if name not in _at_hand.get():
            raise ConfigError(
                f"{what} = '{spec}' was handed over from Python, and this process does not have it. "
                "Call federate(...) again with the same arguments."
            )
        return _at_hand.get()[name]
    found = getattr(load_module(module, "put it on PYTHONPATH"), name, None)
    if not callable(found):
        raise ConfigError(f"{what} = '{spec}': module {module} has no callable '{name}'. Check the name.")
    return found


def load_module(module: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"cannot import {module} ({error}). Remedy: {remedy}.") from None


# --- names that come out of a folder ---

_used: set[str] = set()  # in this process, for where the user's record cannot be written


def remember(specs: Iterable[str]) -> None:
    """The user trains with these: folders that name them may have them imported from now on."""
    entries = {_entry(spec) for spec in specs if ":" in spec and not spec.startswith(f"{GIVEN}:")}
    new = entries - _known() if entries else entries
    _used.update(new)
    if new:
        with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
            _record().parent.mkdir(parents=True, exist_ok=True)
            with _record().open("a") as file:
                file.writelines(f"{entry}\n" for entry in sorted(new))


def is_trusted(spec: str) -> bool:
    """Whether what a folder names is imported without asking."""
    module, colon, rest = spec.partition(":")
    if not colon or module == GIVEN:
        return True
    if module in ("timm", "torchvision") and not set(rest) & set("'\":/"):  # options that can name no file to unpickle
        return True
    return module in os.environ.get(TRUST_VARIABLE, "").split(",") or _entry(spec) in _known()


def check_trusted(spec: str, what: str) -> None:
    if not is_trusted(spec):
        raise ConfigError(
            f"{what} = '{spec}' is code that you have not trained with on this machine, so it is not imported. "
            f"If you trust it, set {TRUST_VARIABLE}={spec.partition(':')[0]} in the environment."
        )


def _entry(spec: str) -> str:
    """A name and the file behind it: the same name means other code in another folder."""
    try:
        found = importlib.util.find_spec(spec.partition(":")[0].partition(".")[0])  # of the outermost: imports nothing
    except (ImportError, ValueError):
        found = None
    return json.dumps([spec, found and (found.origin or list(found.submodule_search_locations or []))])


def _known() -> set[str]:
    try:
        return _used | set(_record().read_text().splitlines())
    except (OSError, RuntimeError, UnicodeDecodeError):
        return _used


def _record() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "hetero-ssfl" / "trained-with"

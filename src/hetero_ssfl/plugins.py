"""A user's own code, by name: `package.module:attribute` is imported; `given:NAME` was handed over in this process.

Configs hold and send names only. An object of a notebook or script has no name that another process could import, so
processes that need it are forked from the one that has it.
"""

import importlib
import sys
from collections.abc import Callable
from itertools import chain, count
from typing import Any
from weakref import WeakValueDictionary

from .errors import ConfigError

GIVEN = "given"
_given: WeakValueDictionary[str, Any] = WeakValueDictionary()


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

    def offer(self) -> None:
        """Let `find` know them, for as long as someone keeps this; of several runs' objects the last offered count."""
        _given.update(self.things)


def find(spec: str, what: str) -> Any:
    """The callable behind a name; `what` is the setting that named it."""
    module, _, name = spec.partition(":")
    if module == GIVEN:
        if name not in _given:
            raise ConfigError(
                f"{what} = '{spec}' was handed over from Python, and this process has not got it. "
                "Call federate(...) again with the same arguments."
            )
        return _given[name]
    found = getattr(load_module(module, "put it on PYTHONPATH"), name, None)
    if not callable(found):
        raise ConfigError(f"{what} = '{spec}': module {module} has no callable '{name}'. Check the name.")
    return found


def load_module(module: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"cannot import {module} ({error}). Remedy: {remedy}.") from None

"""A user's own code, by name: `package.module:attribute` is imported; `given:NAME` was handed over in this process.

Configs hold and send names only. An object of a notebook or script has no name that another process could import, so
processes that need it are forked from the one that has it.
"""

import importlib
import sys
from typing import Any
from weakref import WeakValueDictionary

from .errors import ConfigError

GIVEN = "given"
_given: WeakValueDictionary[str, Any] = WeakValueDictionary()


def spec_of(thing: Any) -> str:
    """The name under which `find` returns a function or class. Whoever gives it must keep it alive."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    module = getattr(thing, "__module__", None) or "__main__"
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is thing:
        return f"{module}:{name}"
    return give(name.replace("<locals>.", "").replace("<lambda>", "lambda"), thing)


def give(name: str, thing: Any) -> str:
    _given[name] = thing
    return f"{GIVEN}:{name}"


def given(name: str) -> Any:
    """What has that name already, if anything."""
    return _given.get(name)


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

"""A user's own code by name: `package.module:attribute` is imported; `given:NAME` is an object passed in this process.

Configs contain and send only names. An object of a notebook or script has no name that another process could import,
so the processes that need it are forked from the one that has it.

The names in a model's or run's folder may be chosen by someone else. Such code is imported only if the user has trained
with it on this machine or declares it trusted: docs/privacy.md.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import Any

from .errors import ConfigError

GIVEN = "given"
TRUST_VARIABLE = "HETERO_SSFL_TRUST"
_at_hand: ContextVar[Mapping[str, Any]] = ContextVar("objects that the current run was given", default={})  # noqa: B039


class Given:
    """Objects passed to one run, by the names that its config uses for them."""

    def __init__(self) -> None:
        self.things: dict[str, Any] = {}
        self._specs: dict[int, str] = {}

    def spec(self, thing: Any, name: str | None = None, keep: Callable[[Any], Any] | None = None) -> str:
        """Return a spec for an object: `module:name` if it can be imported, else `given:NAME` with a unique name."""
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
        """Make these objects available to `find` within this block, and in processes forked from it."""
        token = _at_hand.set(self.things)
        try:
            yield
        finally:
            _at_hand.reset(token)


def is_at_hand(spec: str) -> bool:
    """Return whether the spec names an object that was passed to the current run in this process."""
    module, _, name = spec.partition(":")
    return module == GIVEN and name in _at_hand.get()


def is_missing(spec: str) -> bool:
    """Return whether the spec names an object that does not exist in this process."""
    return spec.startswith(f"{GIVEN}:") and not is_at_hand(spec)


def missing_object(what: str, spec: str) -> str:
    """Return the beginning of an error's sentence about such an object; the call that has it comes next."""
    return f"{what} = '{spec}' is a Python object that does not exist in this process. Call where it was passed"


def find(spec: str, what: str) -> Any:
    """Return the callable with this name. `what` is the setting that contains the name."""
    module, _, name = spec.partition(":")
    if module == GIVEN:
        if name not in _at_hand.get():
            raise ConfigError(f"{missing_object(what, spec)}: federate(..., run_dir=...) and the same other arguments.")
        return _at_hand.get()[name]
    thing = getattr(load_module(module, "Put it on PYTHONPATH"), name, None)
    if not callable(thing):
        raise ConfigError(f"{what} = '{spec}': module {module} has no callable '{name}'. Check the name.")
    return thing


def install_command(extra: str) -> str:
    """Return the command that installs an extra, and keeps the installed torch: pip would replace it by the newest."""
    return f"pip install 'hetero-ssfl[{extra}]' torch=={version('torch').partition('+')[0]}"


def load_module(module: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a user's module may raise any exception
        raise ConfigError(f"cannot import {module} ({error}). {remedy}.") from None


@contextmanager
def modules_beside(folder: Path) -> Iterator[None]:
    """Also find modules in this folder, last, so that they hide nothing. What was imported from it is then forgotten,
    since a module of another folder may have the same name. No bytecode is written there."""
    known, wrote, place = set(sys.modules), sys.dont_write_bytecode, str(folder.resolve())
    sys.path.append(place)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(place)
        sys.dont_write_bytecode = wrote
        for name in set(sys.modules) - known:
            if Path(getattr(sys.modules[name], "__file__", None) or os.sep).is_relative_to(place):
                del sys.modules[name]


# --- where the user's code failed ---

LIBRARIES = (str(Path(__file__).parent) + os.sep, f"{os.sep}site-packages{os.sep}torch{os.sep}", "<frozen ")


def own_frames(error: BaseException, most: int = 4) -> list[traceback.FrameSummary]:
    """Return the last frames of an error outside of this package and torch; if there are none, its last frames."""
    return (_users_frames(error) or list(traceback.extract_tb(error.__traceback__)))[-most:]


def place(error: BaseException) -> str:
    """Return ` (file, line, function)` in which the user's code failed; an empty text if it was not the user's."""
    frames = _users_frames(error)
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not any(library in frame.filename for library in LIBRARIES)]


# --- names found in a folder ---

_used: set[str] = set()  # names used in this process, in case the user's record cannot be written


def remember(specs: Iterable[str]) -> None:
    """Record code that the user trains with. From now on it is imported if a folder names it."""
    _record({_entry(spec) for spec in specs if ":" in spec and not spec.startswith(f"{GIVEN}:")})


def remember_places(places: Iterable[str]) -> None:
    """Record data and node settings files that the user trains with. From now on they are read if folders name them."""
    _record({_place(place) for place in places})


def is_known_place(place: str) -> bool:
    """Return whether data or a settings file that a folder names may be read."""
    if place in os.environ.get(TRUST_VARIABLE, "").split(","):
        return True
    was_here = json.dumps(["place", str(Path(place).expanduser().absolute())])  # it may have been moved since
    return not {_place(place), was_here}.isdisjoint(_known())


def check_place(place: str, what: str) -> None:
    if not is_known_place(place):
        remedy = f"If you trust the folder that names it, set {TRUST_VARIABLE}={place} in the environment."
        raise ConfigError(f"{what} = '{place}' was not used for training on this machine, so it is not read. {remedy}")


def _place(place: str) -> str:
    path = Path(place).expanduser()
    return json.dumps(["place", str(path.absolute()) if path.exists() else place])


def is_trusted(spec: str) -> bool:
    """Return whether code that a folder names may be imported."""
    module, colon, rest = spec.partition(":")
    if not colon or module == GIVEN:
        return True
    if module in ("timm", "torchvision") and not set(rest) & set("'\":/"):  # options cannot name a file to unpickle
        return True
    return module in os.environ.get(TRUST_VARIABLE, "").split(",") or _entry(spec) in _known()


def check_trusted(spec: str, what: str) -> None:
    if not is_trusted(spec):
        remedy = f"If you trust it, set {TRUST_VARIABLE}={spec.partition(':')[0]} in the environment."
        raise ConfigError(f"{what} = '{spec}' is code that you have not trained with on this machine. {remedy}")


def _entry(spec: str) -> str:
    """Return a name and its file: the same name may refer to other code in another folder."""
    try:
        package = importlib.util.find_spec(re.split("[:.]", spec, maxsplit=1)[0])  # imports nothing
    except (ImportError, ValueError):
        package = None
    return json.dumps([spec, package and (package.origin or list(package.submodule_search_locations or []))])


def _known() -> set[str]:
    try:
        return _used | set(_record_file().read_text().splitlines())
    except (OSError, RuntimeError, UnicodeDecodeError):
        return _used


def _record(entries: set[str]) -> None:
    new = entries - _known()
    _used.update(new)
    if new:
        with suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
            _record_file().parent.mkdir(parents=True, exist_ok=True)
            with _record_file().open("a") as file:
                file.writelines(f"{entry}\n" for entry in sorted(new))


def _record_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "hetero-ssfl" / "trained-with"

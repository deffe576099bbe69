"""Read TOML, presets and overrides into a validated config, or raise a one-sentence error.

Unknown keys are refused, and the error names the nearest known key: a misspelt setting that is silently ignored can
cost a day of training.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ..errors import ConfigError
from .schema import Config
from .sections.base import Section
from .sections.learning import ModelConfig

PRESETS = resources.files("hetero_ssfl.presets")

SectionT = TypeVar("SectionT", bound=Section)


def parse_config(text: str, overrides: Iterable[str] = (), origin: str = "the config") -> Config:
    """Read TOML, apply `key=value` overrides, validate. Raises ConfigError with a remedy."""
    try:
        return validate(_changed(tomllib.loads(text), settings_of(overrides)), Config)
    except ValueError as error:  # TOMLDecodeError is one; a number of thousands of digits raises another
        raise ConfigError(f"{origin} is not valid TOML: {str(error)[:200]}. Fix that line.") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply, expected sections with settings. Simplify it.") from None


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested sections as one mapping: {"rad": {"size": 9}} becomes {"rad.size": 9}."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        settings |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {above + key: value}
    return settings


def load_config(preset_or_path: str, overrides: Iterable[str] = ()) -> Config:
    """Load a preset by name, or a TOML file by path."""
    if preset_or_path in preset_names():
        return parse_config(preset_text(preset_or_path), overrides, f"preset {preset_or_path}")
    path = Path(preset_or_path)
    if path.suffix != ".toml" and not path.exists():
        choices = _choices([*preset_names(), *map(str, path.parent.glob("*.toml"))], preset_or_path)
        raise ConfigError(f"unknown preset '{preset_or_path}', expected {choices} or a path that ends in .toml.")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"cannot read config '{path}': {reason}. Check the path.") from None
    return parse_config(text, overrides, str(path))


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return a copy of the config with some settings changed, by the same keys as `--set`: {"alignment.mu": 4}."""
    values = config.model_dump(mode="json", exclude_unset=True)  # defaults may depend on what changes
    return validate(_changed(values, settings), Config)


def differences(before: Config, after: Config) -> dict[str, Any]:
    """Return the settings that differ between two configs, with their values in the second."""
    old, new = flat(before.model_dump(mode="json")), flat(after.model_dump(mode="json"))
    return {key: new.get(key) for key in {**old, **new} if old.get(key) != new.get(key)}


def evaluation_config(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return a copy of the config with other settings of `[evaluation]`. Only these can change for a finished run."""
    odd = next((key for key in settings if not key.startswith("evaluation.")), None)
    if odd:
        raise ConfigError(f"'{odd}' cannot be set here: only evaluation.* can change for a finished run. Remove it.")
    return with_settings(config, settings)


def preset_names() -> list[str]:
    return sorted(entry.name[:-5] for entry in PRESETS.iterdir() if entry.name.endswith(".toml"))


def preset_text(name: str) -> str:
    if name not in preset_names():
        raise ConfigError(f"unknown preset '{name}', expected {_choices(preset_names(), name)}.")
    return PRESETS.joinpath(f"{name}.toml").read_text()


def validate(values: dict[str, Any], kind: type[SectionT]) -> SectionT:
    """Build a section from plain values. Raise ConfigError for the first invalid value."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, kind)) from None


def settings_of(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the settings of `key=value` texts, as `--set` takes them: {"alignment.mu": 2}."""
    settings: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override '{override}' has no '=', expected key=value such as alignment.mu=2.")
        try:
            settings[key.strip()] = tomllib.loads(f"x = {text.strip()}")["x"]
        except tomllib.TOMLDecodeError:
            settings[key.strip()] = text.strip()  # a bare word needs no second pair of quotes in a shell
    return settings


def _changed(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write settings such as {"alignment.mu": 2} into nested sections, and return these."""
    for key, value in settings.items():
        *parents, leaf = key.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                reason = f"'{parent}' is a value, not a section"
                raise ConfigError(f"override '{key}={value}' cannot be applied: {reason}. Shorten the key.")
        section[leaf] = value
    return values


def _explain(error: ValidationError, kind: type[Section]) -> str:
    # A union reports each member it tried; the deepest location is the one the user meant.
    problem = max(error.errors(), key=lambda e: (e["type"] == "extra_forbidden", len(e["loc"])))
    unknown = problem["type"] == "extra_forbidden"
    # Keep the last part, which is the user's key. In the parts above it, drop the names that a union adds.
    *above, last = problem["loc"] or [""]
    where = [p for p in above if isinstance(p, int) or (p.isidentifier() and p not in ("int", "float", "str"))]
    if unknown or isinstance(last, int) or (last.isidentifier() and last not in ("int", "float", "constrained")):
        where.append(last)
    key = ".".join(map(str, where))
    if unknown:
        section: Any = kind
        for part in where[:-1]:
            annotation = section.model_fields[part].annotation if isinstance(part, str) else ModelConfig
            section = annotation if isinstance(annotation, type) else ModelConfig
        inner = [own for own in flat(Config().model_dump()) if own.endswith(f".{key}")] if kind is Config else []
        if inner:
            return f"unknown key '{key}', expected {' or '.join(map(repr, inner))}."
        return f"unknown key '{key[:200]}', expected {_choices(section.model_fields, str(where[-1]))}."
    if not key:
        return problem["msg"].removeprefix("Value error, ")
    message = re.sub(r"^(Input|Tuple|List|Dictionary|String|Value error,) ", "", problem["msg"])
    message = re.sub(r" after validation, not \d+$", "", message)
    return f"{key} = {_short(problem['input'])} is not possible: it {message}. Change that value."


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "that number"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _choices(known: Iterable[str], wrong: str) -> str:
    """Return the nearest known name if one is close, else all known names."""
    known = list(known)
    near = difflib.get_close_matches(wrong, known, n=1)
    return f"'{near[0]}' (the nearest of {len(known)})" if near else "one of " + ", ".join(known)

"""Every setting with its default, the values it accepts and its meaning, read from the schema."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import tomli_w

from ..errors import ConfigError
from .schema import Config
from .sections.base import Section
from .sections.learning import ModelConfig

NUMBERS = {"integer": "a whole number", "number": "a number"}
LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


@dataclass(frozen=True)
class Setting:
    key: str  # in full, such as `alignment.mu`
    default: str  # as in a config file; empty if the setting is unset
    values: str
    meaning: str

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]


def all_settings() -> list[Setting]:
    """Return the settings in the order of the schema, those without a section first."""
    return sorted(_settings(Config, ""), key=lambda setting: setting.section != "")


def section_meanings() -> dict[str, str]:
    """Return the descriptions of whole sections."""
    return {name: " ".join(kind.__doc__.split()) for name, kind in _sections().items() if kind.__doc__}


def settings_named(pattern: str) -> list[Setting]:
    """Return the settings whose full name, last name or section matches, with wildcards such as `*.lr`.

    A full name or a section has precedence over the last name.
    """
    known, wanted = all_settings(), pattern.strip("[]")
    matching = [s for s in known if fnmatchcase(s.key, wanted) or fnmatchcase(s.section, wanted)]
    matching = matching or [s for s in known if fnmatchcase(s.key.rpartition(".")[2], wanted)]
    if not matching:
        names = [*(s.key for s in known), *_sections()]
        near = difflib.get_close_matches(pattern, names, n=1) or [s.key for s in known if s.key.endswith(pattern)][:1]
        hint = f"Did you mean '{near[0]}'?" if near else "Print all with: hetero-ssfl list settings"
        raise ConfigError(f"there is no setting or section '{pattern}'. {hint}")
    return matching


def _sections() -> dict[str, type[Section]]:
    fields = {name: field.annotation for name, field in Config.model_fields.items()}
    sections = {name: kind for name, kind in fields.items() if isinstance(kind, type) and issubclass(kind, Section)}
    return sections | {"clients.models": ModelConfig}


def _settings(section: type[Section], name: str) -> Iterator[Setting]:
    schemas, sections = section.model_json_schema()["properties"], _sections()
    for key, field in section.model_fields.items():
        full = f"{name}.{key}" if name else key
        if field.annotation is not sections.get(full):
            default = "" if field.is_required() else _toml(field.get_default(call_default_factory=True))
            yield Setting(full, default, _values(schemas[key]), " ".join((field.description or "").split()))
        if full in sections:
            yield from _settings(sections[full], full)


def _toml(value: object) -> str:
    """Return a default as it stands in a config file."""
    if value is None:
        return ""
    if isinstance(value, tuple) and value and isinstance(value[0], ModelConfig):
        value = [model.encoder for model in value]
    return " ".join(tomli_w.dumps({"x": value}).removeprefix("x = ").split()).replace("[ ", "[").replace(", ]", "]")


def _values(schema: dict[str, Any]) -> str:
    """Return in words which values a JSON schema accepts."""
    if "anyOf" in schema:
        parts = [_values(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(part for part in parts if part))
    if "$ref" in schema:
        return "encoders, or tables of the keys below" if schema["$ref"].endswith("/ModelConfig") else "tables"
    choices = schema.get("enum") or schema.get("examples") or ([schema["const"]] if "const" in schema else [])
    if choices:
        return ", ".join(map(_toml, choices))
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("prefixItems")
        return f"[{', '.join(map(_values, items))}]" if items else f"a list: {_values(schema['items'])}"
    if kind == "boolean":
        return "true, false"
    limits = " and ".join(f"{phrase} {schema[key]:g}" for key, phrase in LIMITS.items() if key in schema)
    return f"{NUMBERS[kind]} {limits}".rstrip() if kind in NUMBERS else ""

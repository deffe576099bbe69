"""Every setting with its default, the values it accepts and its meaning, read from the schema."""

import ast
import difflib
import inspect
import re
from dataclasses import dataclass
from typing import Any

import tomli_w
from pydantic import BaseModel

from ..errors import ConfigError
from . import schema
from .schema import Config, ModelConfig


@dataclass(frozen=True)
class Setting:
    key: str
    """The full key, such as `alignment.mu`."""
    default: str
    """As in a config file; empty if the setting is unset."""
    values: str
    meaning: str

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]


def all_settings() -> list[Setting]:
    """Return the settings in the order of the schema, those without a section first."""
    return sorted(_settings(Config, ""), key=lambda setting: setting.section != "")


def section_meanings() -> dict[str, str]:
    """Return what is said about whole sections."""
    sections = {name: kind for name, kind in _sections().items() if kind.__doc__ and kind.__doc__ != BaseModel.__doc__}
    return {name: " ".join(inspect.getdoc(kind).split()) for name, kind in sections.items()}  # type: ignore[union-attr]


def settings_named(key: str) -> list[Setting]:
    """Return one setting by its full or its last name, or all settings of a section."""
    known = all_settings()
    section = key.strip("[]")
    found = [s for s in known if key == s.key or section == s.section] or [
        s for s in known if key == s.key.rpartition(".")[2]
    ]
    if not found:
        names = [*(s.key for s in known), *_sections()]
        near = difflib.get_close_matches(key, names, n=1) or [s.key for s in known if s.key.endswith(key)][:1]
        hint = f"Did you mean '{near[0]}'?" if near else "Print all with: hetero-ssfl settings"
        raise ConfigError(f"there is no setting or section '{key}'. {hint}")
    return found


def _sections() -> dict[str, type[BaseModel]]:
    fields = {name: field.annotation for name, field in Config.model_fields.items()}
    sections = {name: kind for name, kind in fields.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    return {**sections, "clients.models": ModelConfig}


def _settings(section: type[BaseModel], name: str) -> list[Setting]:
    described = section.model_json_schema()
    written = _written(section)
    found = []
    for key, field in section.model_fields.items():
        full = f"{name}.{key}" if name else key
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            annotation, meaning = written[key]
            default = "" if field.is_required() else _toml(field.get_default(call_default_factory=True))
            found.append(Setting(full, default, _values(described["properties"][key], annotation), meaning))
        if full in _sections():
            found += _settings(_sections()[full], full)
    return found


def _written(section: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """Return each field's annotation and the text below it, from the source of the schema."""
    (body,) = [
        node.body
        for node in ast.parse(inspect.getsource(schema)).body
        if isinstance(node, ast.ClassDef) and node.name == section.__name__
    ]
    found = {}
    for node, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            found[node.target.id] = ast.unparse(node.annotation), " ".join(str(text).split())
    return found


def _toml(value: object) -> str:
    """Return a default as it stands in a config file."""
    if value is None:
        return ""
    if isinstance(value, tuple) and value and isinstance(value[0], ModelConfig):
        value = [model.encoder for model in value]
    return " ".join(tomli_w.dumps({"x": value}).removeprefix("x = ").split()).replace("[ ", "[").replace(", ]", "]")


def _values(described: dict[str, Any], annotation: str) -> str:
    """Return the accepted values in words."""
    if "anyOf" in described:
        parts = [_values(part, annotation) for part in described["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(part for part in parts if part))
    if "enum" in described or "const" in described:
        return ", ".join(_toml(choice) for choice in described.get("enum", [described.get("const")]))
    kind = described.get("type")
    if kind == "array":
        items = described.get("prefixItems")
        if items:
            return f"[{', '.join(_values(item, annotation) for item in items)}]"
        tables = "encoders, or tables of the keys below" if "ModelConfig" in annotation else "tables"
        return f"a list: {_values(described['items'], annotation) or tables}"
    if kind == "string":
        known = re.findall(r"'([\w-]+)'", annotation)
        own = ['"package.module:callable"'] if "named_code" in annotation else []
        return ", ".join([*(f'"{name}"' for name in known), *own])
    if kind == "boolean":
        return "true, false"
    return f"{'a whole number' if kind == 'integer' else 'a number'}{_range(described)}" if kind else ""


def _range(described: dict[str, Any]) -> str:
    low, above = described.get("minimum"), described.get("exclusiveMinimum")
    high, below = described.get("maximum"), described.get("exclusiveMaximum")
    lower = f"at least {low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    upper = f"at most {high:g}" if high is not None else f"below {below:g}" if below is not None else ""
    words = " and ".join(filter(None, [lower, upper]))
    return f" {words}" if words else ""

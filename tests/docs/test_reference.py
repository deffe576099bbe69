"""`hetero-ssfl list settings`, and what the page of settings is built from."""

import json
import tomllib
from collections.abc import Callable

import pytest

from hetero_ssfl.config import Config, parse_config
from hetero_ssfl.config.reference import Setting, all_settings

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("setting", all_settings(), ids=lambda s: s.key)
def test_every_setting_has_a_meaning_and_its_default_is_accepted(setting: Setting) -> None:
    assert setting.meaning.endswith("."), "a setting needs a sentence below it in config/schema.py or config/sections"
    if setting.default and not setting.key.startswith("clients.models"):
        config = parse_config("", [f"{setting.key}={setting.default}"])
        assert config == Config()


def test_no_setting_is_missing() -> None:
    described = {setting.key for setting in all_settings()}
    default = tomllib.loads(Config().to_toml())
    written = {key if not isinstance(value, dict) else f"{key}.{inner}"
               for key, value in default.items() for inner in (value if isinstance(value, dict) else [""])}  # fmt: skip
    assert written <= described


def test_the_command_prints_a_setting_a_section_and_all(call: Call) -> None:
    _, shown, _ = call("list", "settings", "optim.batch")
    assert shown.splitlines() == ["optim.batch = 128", "Images per step.", "values: a whole number at least 2"]
    found = json.loads(call("list", "settings", "alignment", "--json")[1])["settings"]
    assert {"key": "alignment.mu", "default": "1.0", "values": "a number at least 0"}.items() <= found[0].items()
    assert len(found) < len(json.loads(call("list", "settings", "--json")[1])["settings"]) == len(all_settings())
    assert json.loads(call("list", "settings", "ssl.kind", "--json")[1])["settings"][0]["values"].startswith(
        '"byol", "simsiam"'
    )
    assert "[views]" in call("list", "settings")[1]


def test_an_unknown_setting_names_the_nearest(call: Call) -> None:
    code, _, said = call("list", "settings", "alignment.mew")
    assert (code, "Did you mean 'alignment.mu'?" in said) == (2, True)

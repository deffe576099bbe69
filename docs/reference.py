"""The parts of the site that are written from the code: commands, settings, public names and kinds of event."""

import inspect
import sys
from collections.abc import Iterator

import click
import typer

import hetero_ssfl
from hetero_ssfl.cli import app
from hetero_ssfl.config.reference import all_settings, section_meanings

COMMANDS = """# Commands

This is the text of `hetero-ssfl COMMAND --help`. After `hetero-ssfl --install-completion`, Tab completes commands,
options and presets. With `--json` a command prints one JSON object instead of tables. Exit codes: 0 means done, 2 means
a problem that you can fix (one sentence says how), 130 means interrupted (finished rounds are kept).
"""

SETTINGS = """# Settings

A config lists only the settings that differ from these defaults. Unknown keys are refused, and the error names the
nearest known key. On the command line, `--set alignment.mu=2` changes one setting of a preset or file; in Python, use
`settings={"alignment.mu": 2}`. `hetero-ssfl list settings [PATTERN]` prints this table, or a part of it. A node of a
federation between machines has [node settings](deployment.md#node-settings-nodetoml) of its own.
"""


def commands_page() -> str:
    return COMMANDS + "\n".join(_commands(typer.main.get_command(app), "hetero-ssfl"))


def settings_page() -> str:
    return SETTINGS + "\n".join(_settings())


def public_names() -> str:
    """Return a table of every public name with the first paragraph about it."""
    rows = [
        f"| `{name}` | {_cell(_first_paragraph(getattr(hetero_ssfl, name)))} |"
        for name in hetero_ssfl.__all__
        if name != "__version__"
    ]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _settings() -> Iterator[str]:
    meanings, section = section_meanings(), None
    for setting in all_settings():
        if setting.section != section:
            section = setting.section
            yield f"\n## {f'[{section}]' if section else 'Top level'}\n"
            if section in meanings:
                yield f"{meanings[section]}\n"
            yield "| setting | default | values | meaning |\n|---|---|---|---|"
        default = f"`{setting.default}`" if setting.default else "unset"
        yield f"| `{setting.key.rpartition('.')[2]}` | {default} | {setting.values} | {setting.meaning} |"


def _commands(command: click.Command, name: str) -> Iterator[str]:
    """The help of a command, or of all commands of a group."""
    if isinstance(command, click.Group):
        for part, inner in command.commands.items():
            yield from _commands(inner, f"{name} {part}")
        return
    words, _, examples = (command.help or "").partition("\nExample")
    lines = examples.splitlines()[1:]
    shown = [line.strip() for line in lines if line.startswith(" ")]
    after = " ".join(line for line in lines if not line.startswith(" ")).strip()
    yield f"\n## {name.removeprefix('hetero-ssfl ')}\n\n{words}\n\n```sh"
    yield from shown
    yield "```\n" + (f"\n{after}\n" if after else "")
    yield "| option | meaning |\n|---|---|"
    context = click.Context(command, info_name=name)
    for parameter in command.params:
        usage = ", ".join(parameter.opts) if isinstance(parameter, click.Option) else parameter.make_metavar(context)
        yield f"| `{usage}` | {_cell(getattr(parameter, 'help', None))} |"


def _first_paragraph(thing: object) -> str:
    """Return its own docstring or, for the only class of a module, that of the module."""
    if isinstance(thing, dict):
        return f"By name: {', '.join(thing)}."
    own = thing.__doc__ if inspect.isroutine(thing) else vars(thing).get("__doc__")  # not that of a base class
    text = own or sys.modules[thing.__module__].__doc__ or ""
    return str(inspect.cleandoc(text).partition("\n\n")[0])


def _cell(text: str | None) -> str:
    """Return text for one cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")

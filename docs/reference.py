"""Write the tables of docs/settings.md, docs/commands.md and docs/api.md. Run it after a change of any of them:

    python docs/reference.py

A test compares the pages with what this would write.
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import typer

import hetero_ssfl
from hetero_ssfl.cli import app
from hetero_ssfl.config.reference import all_settings, section_meanings

DOCS = Path(__file__).parent
BEGIN = "<!-- written by: python docs/reference.py -->"
END = "<!-- end -->"


def pages() -> dict[Path, str]:
    """Return each page with its table made anew."""
    made = {
        "settings.md": _settings(),
        "commands.md": _commands(typer.main.get_command(app), "hetero-ssfl"),
        "api.md": _names(),
    }
    return {DOCS / name: _with_table(DOCS / name, lines) for name, lines in made.items()}


def _with_table(page: Path, lines: Iterator[str]) -> str:
    before, _, rest = page.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}"


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


def _names() -> Iterator[str]:
    """Every public name with the first sentence about it."""
    yield "\n| name | what it is |\n|---|---|"
    for name in hetero_ssfl.__all__:
        if name != "__version__":
            yield f"| `{name}` | {_cell(_first_paragraph(getattr(hetero_ssfl, name)))} |"
    yield ""


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


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)

"""The tree of commands, and a check that a command line can be parsed."""

import shlex
import sys
from collections.abc import Iterator

import click
import typer

from hetero_ssfl.cli import app

ROOT = typer.main.get_command(app)
PROGRAM = [sys.executable, "-c", "from hetero_ssfl.cli import main; main()"]
"""Starts `hetero-ssfl` in a new process."""


def every_command(group: click.Command = ROOT, name: str = "hetero-ssfl") -> Iterator[tuple[str, click.Command]]:
    """Yield every leaf command with its full name."""
    if not isinstance(group, click.Group):
        yield name, group
        return
    for part, command in group.commands.items():
        yield from every_command(command, f"{name} {part}")


def words(line: str) -> list[str]:
    """Split one command into words, without pipes and redirections."""
    found = shlex.split(line, comments=True)
    ends = [place for place, word in enumerate(found) if word in ("&&", "|", ">", "2>", ";")]
    return found[: ends[0]] if ends else found


def check_line(line: str) -> None:
    """Parse a line that calls hetero-ssfl; raise click.UsageError for an unknown command, option or value."""
    parts = words(line)
    arguments = parts[parts.index("hetero-ssfl") + 1 :]
    command: click.Command = ROOT
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        name, arguments = arguments[0], arguments[1:]
        assert name in command.commands, f"`{line}`: there is no command '{name}'"
        command = command.commands[name]
    if isinstance(command, click.Group):  # making its context would run --version, print and exit
        known = {text for option in command.params for text in option.opts}
        assert arguments, f"`{line}` names no command"
        assert arguments[0] in known, f"`{line}`: there is no option '{arguments[0]}'"
    else:
        command.make_context(line, arguments)  # parses and converts; only `invoke` would run it

"""The command line's own help: --help, --version and shell completion."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from helpers.commands import check_line, every_command
from hetero_ssfl import __version__
from hetero_ssfl.config import preset_names

COMMANDS = dict(every_command())
PROGRAM = [sys.executable, "-c", "import sys; sys.argv[0] = 'hetero-ssfl'; from hetero_ssfl.cli import main; main()"]


def examples(command: click.Command) -> list[str]:
    lines = (command.help or "").splitlines()
    return [line.strip() for line in lines if "hetero-ssfl " in line and line.startswith(" ")]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_a_sentence_and_valid_examples(name: str) -> None:
    text = COMMANDS[name].help or ""
    first = text.split("\n\n")[0]
    assert first.endswith("."), f"{name}: '{first}' is not a sentence"
    assert "\nExample" in text, f"{name} has no examples"
    assert examples(COMMANDS[name])
    for line in examples(COMMANDS[name]):
        assert f"{name} " in f"{line} ", f"'{line}' is not an example of {name}"
        assert len(line) < 78, f"'{line}' would be broken on a narrow terminal"
        check_line(line)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_argument_has_a_help_text(name: str) -> None:
    silent = [p.name for p in COMMANDS[name].params if not getattr(p, "help", None)]
    assert not silent, f"{name}: {silent}"


@pytest.mark.parametrize("line", ["hetero-ssfl rnu smoke", "hetero-ssfl run smoke --sead 1", "hetero-ssfl compare"])
def test_the_check_of_a_line_detects_unknown_commands_and_options(line: str) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        check_line(line)


def completions(typed: str) -> list[str]:
    """Return the completions that bash offers after these words."""
    place = len(typed.split()) - (0 if typed.endswith(" ") else 1)
    env = {"_HETERO_SSFL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(place)}
    return subprocess.run(PROGRAM, capture_output=True, text=True, env={**os.environ, **env}).stdout.split()


def test_the_shell_completes_commands_presets_and_options() -> None:
    assert completions("hetero-ssfl ru") == ["run"]
    assert completions("hetero-ssfl run ") == preset_names()
    assert completions("hetero-ssfl sweep sm") == ["smoke"]
    assert "--run-dir" in completions("hetero-ssfl run --")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_printed(shell: str) -> None:
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # not the shell that runs the tests
    shown = subprocess.run([*PROGRAM, "--show-completion", shell], capture_output=True, text=True, env=named)
    assert "_HETERO_SSFL_COMPLETE=" in shown.stdout, shown.stderr


def test_the_version_is_printed_outside_any_repository(tmp_path: Path) -> None:
    shown = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert shown.stdout == f"hetero-ssfl {__version__}\n"

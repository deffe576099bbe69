"""Every code block in the documentation works.

Python code and quick commands run page by page in a folder with small images. Long commands (DEMANDING) are only parsed
and their settings checked; they have their own tests. Runs whose folder already exists are copies of one small run.
tests/test_packaging.py follows README.md exactly, with the installed wheel; test_medical_page.py follows medical.md.
"""

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.blocks import ROOT, Block, blocks_of
from helpers.commands import check_line, words
from helpers.pictures import write_folders
from hetero_ssfl.cli import app
from hetero_ssfl.config import load_config, parse_config
from hetero_ssfl.federation.participants.node_settings import read_node

# The site's page of commands holds the examples of --help, which test_help.py checks.
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERYWHERE = [block for page in [ROOT / "README.md", *PAGES] for block in blocks_of(page)]
DEMANDING = (  # they take minutes, start other programs, or need certain ports of this machine
    *("demo", "paper", "sweep", "audit", "theory", "check machine", "watch"),
    *("deploy local", "deploy check"),
)
OTHER_PROGRAMS = {"pip", "python", "tensorboard"}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create what the pages assume: folders of images, and a finished run of `smoke`."""
    folder = tmp_path_factory.mktemp("reader")
    write_folders(folder)
    app(["run", "smoke", "--run-dir", str(folder / "runs" / "smoke"), "--quiet"], standalone_mode=False)
    for name in ("a", "b"):
        shutil.copytree(folder / "runs" / "smoke", folder / "runs" / name)
    return folder


@pytest.fixture
def reader(ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a folder for each page; modules in it can be imported and are unloaded afterwards."""
    shutil.copytree(ground, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "medical"], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_work(page: Path, reader: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.not_run:
            continue
        if block.file:
            (reader / block.file).write_text(block.text)
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
        elif block.language == "toml":
            check_toml(block, reader)
        elif block.language == "sh":
            for command in block.commands:
                follow(command, block)


def check_toml(block: Block, folder: Path) -> None:
    values = tomllib.loads(block.text)
    if "project" in values:
        ((group, entries),) = values["project"]["entry-points"].items()
        assert group == "hetero_ssfl.methods"
        assert all(re.fullmatch(r"[\w.]+:\w+", entry) for entry in entries.values())
    elif {"name", "encoder"} <= values.keys():
        path = folder / f"node-{block.line}.toml"
        path.write_text(block.text)
        read_node(path)
    else:
        parse_config(block.text)


def follow(command: str, block: Block) -> None:
    program, *rest = words(command)
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
            f"{block}: no target {rest[0]}"
        )
    elif program.endswith("hetero-ssfl"):
        check_line(command)
        if not " ".join(rest).startswith(DEMANDING) and not (rest[0] == "run" and settled(rest[1:])):
            app(rest, standalone_mode=False)
    else:
        assert program in OTHER_PROGRAMS, f"{block}: what is {program}?"
        assert program != "python" or (ROOT / rest[0]).exists(), f"{block}: there is no {rest[0]}"


def settled(arguments: list[str]) -> bool:
    """Tell whether to skip `run`: its folder exists, or it would take long; then only its settings are checked."""
    if "--run-dir" in arguments and Path(arguments[arguments.index("--run-dir") + 1]).exists():
        return True
    if arguments[0] == "--resume" or (arguments[0] == "smoke" and "--engine" not in arguments):
        return False
    overrides = [arguments[place + 1] for place, word in enumerate(arguments) if word == "--set"]
    if not arguments[0].endswith(".toml"):
        load_config(arguments[0], overrides)
    return True


def test_every_block_names_its_language() -> None:
    for block in EVERYWHERE:
        assert block.language in ("python", "sh", "toml", "text", ""), f"{block} is in an unknown language"
        if not block.language:
            assert not re.search(r"^(hetero-ssfl|make|import|from) ", block.text, re.MULTILINE), (
                f"{block}: which language?"
            )


def test_only_few_blocks_are_not_run() -> None:
    assert len([block for block in EVERYWHERE if block.not_run]) <= 3


def test_the_page_about_methods_shows_a_whole_one_in_15_lines() -> None:
    code = next(block.text for block in blocks_of(ROOT / "docs" / "methods.md") if "(Method)" in block.text)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15

"""The documentation site builds without warnings, loads nothing from other hosts, and names only what exists."""

import os
import re
import subprocess
import sys
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import hetero_ssfl
from helpers.commands import every_command
from hetero_ssfl.config import Config
from hetero_ssfl.runs.events import KINDS

ROOT = Path(__file__).parents[2]
ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\b(?:src|srcset)=["']?(?:https?:)?//[^>]*>"""
    r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//[^>]*>"""
    r"""|(?:@import\s+|url\()["']?(?:https?:)?//[^)\s]*""",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # hides an announcement of a successor
    # --quiet would make --strict ignore warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_no_page_or_style_loads_anything_from_other_hosts(site: Path) -> None:
    files = [path for kind in ("*.html", "*.css", "*.svg") for path in site.rglob(kind)]
    assert len(files) > 15
    for path in files:
        found = ELSEWHERE.search(path.read_text())
        assert not found, f"{path.relative_to(site)}: {found[0] if found else ''}"


@pytest.mark.parametrize(
    "text",
    ['<script async src="https://x.org/a.js">', "<link href=//x.org/a.css rel=stylesheet>", "url('http://x.org')"],
)
def test_the_search_for_external_resources_finds_them(text: str) -> None:
    assert ELSEWHERE.search(text)


def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "algorithm" / "index.html").read_text()
    assert page.count("<math ") > 40
    assert "arithmatex" not in page
    assert "$" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "api" / "index.html").read_text()
    missing = [
        name for name in hetero_ssfl.__all__ if name != "__version__" and not re.search(rf'id="[\w.]*\.{name}"', page)
    ]
    assert not missing


def test_every_command_is_on_its_page(site: Path) -> None:
    page = (site / "commands" / "index.html").read_text()
    for name, command in every_command():
        assert f'id="{"-".join(name.split()[1:])}"' in page, name
        for option in command.params:
            assert option.opts[0] in page or option.name.upper() in page, (name, option.opts)


def test_every_kind_of_event_is_in_the_guide(site: Path) -> None:
    page = (site / "guide" / "index.html").read_text()
    assert not [kind for kind in KINDS if f"<code>{kind}</code>" not in page]


def test_the_first_page_is_the_top_of_the_readme(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert 'src="assets/round.svg"' in page
    text = re.sub(r"<[^>]+>", "", page)
    assert "make demo" in text
    assert "make test" in text


def test_the_documentation_stays_short() -> None:
    """Longer pages are read by nobody. Cut something before you raise a number."""
    count = {path: len(path.read_text().split()) for path in (ROOT / "docs").glob("*.md")}
    assert len((ROOT / "README.md").read_text().split()) <= 1100
    assert count[ROOT / "docs" / "results.md"] <= 5000
    assert sum(count.values()) <= 26000


def every_key(section: type[BaseModel]) -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        inner: Any = field.annotation
        found |= every_key(inner) if isinstance(inner, type) and issubclass(inner, BaseModel) else {name}
    return found


def test_every_setting_is_on_its_page(site: Path) -> None:
    page = (site / "settings" / "index.html").read_text()
    missing = [key for key in every_key(Config) if f"<code>{key}</code>" not in page]
    assert not missing


def test_names_in_the_text_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for path in pages:
        for name in re.findall(r"`(hetero_ssfl(?:\.\w+)+)`", path.read_text()):
            parts = name.split(".")
            for split in range(len(parts), 0, -1):
                try:
                    home = import_module(".".join(parts[:split]))
                except ModuleNotFoundError:
                    continue
                break
            try:
                reduce(getattr, parts[split:], home)
            except AttributeError:
                pytest.fail(f"{path.name} names {name}, which does not exist")
        for name in re.findall(r"`((?:src|tests|examples|experiments|benchmarks|docs)/[\w./-]+)`", path.read_text()):
            assert "NAME" in name or (ROOT / name).exists(), f"{path.name} names {name}, which does not exist"


def test_links_between_files_outside_the_site_work() -> None:
    """mkdocs checks the links of its own pages."""
    for path in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", path.read_text()):
            if not target.startswith("http"):
                assert (ROOT / target).exists(), f"{path.name} links to {target}"

"""What mkdocs does not do by itself: pages written from the code, the top of the README, formulas as MathML."""

import html
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import reference  # docs/reference.py

from hetero_ssfl.runs.events import KINDS

ROOT = Path(__file__).parents[1]
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
WRITTEN = {"commands.md": reference.commands_page, "settings.md": reference.settings_page}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for name, write in WRITTEN.items():
        files.append(File.generated(config, name, content=write()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- insert: NAME -->`, with the text for readers on GitHub up to `<!-- end -->`, by what it names."""
    parts = {"readme": readme_top, "names": reference.public_names, "events": event_kinds}
    return re.sub(r"<!-- insert: (\w+) -->.*?<!-- end -->", lambda found: parts[found[1]](), markdown, flags=re.DOTALL)


def readme_top() -> str:
    """Return the README's first section and its table of pages, with links as seen from docs/."""
    top, results, *others = (ROOT / "README.md").read_text().split("\n## ")
    (pages,) = (part.rpartition("|\n")[0] + "|\n" for part in others if part.startswith("Where to go\n"))
    return "\n## ".join([top, results, pages]).replace("](docs/", "](")


def event_kinds() -> str:
    """Return a Markdown table of the kinds of events."""
    rows = ["| `event` | in events.jsonl | fields | meaning |", "|---|---|---|---|"]
    for kind in KINDS.values():
        names = ", ".join(f"`{f.name}`" for f in fields(kind))
        rows.append(f"| `{kind.kind}` | {'yes' if kind.saved else 'no'} | {names} | {kind.__doc__} |")
    return "\n".join(rows)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which needs no scripts."""
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    tag, formula = found.groups()
    return str(convert(html.unescape(formula), display="inline" if tag == "span" else "block"))

"""Replace what a script prints on a page of the documentation, between the two marks of that script."""

import sys
from pathlib import Path


def write(page: Path, script: str, text: str) -> None:
    begin, end = f"<!-- printed by {script} -->", f"<!-- end of what {script} prints -->"
    content = page.read_text() if page.is_file() else ""
    if begin not in content or end not in content:
        sys.exit(f"'{page}' has no line '{begin}' or no line '{end}' to put the tables between.")
    before, after = content.split(begin)[0], content.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")

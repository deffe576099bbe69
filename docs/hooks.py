"""Formulas of the site as MathML, which needs no scripts."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    tag, formula = found.groups()
    return str(convert(html.unescape(formula), display="inline" if tag == "span" else "block"))

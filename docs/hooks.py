"""What the site is made with: formulas as MathML, which needs no scripts, and tables of commands and settings."""

import html
import re
from collections.abc import Iterator
from typing import Any

import click
import griffe
import typer
from latex2mathml.converter import convert

from hetero_ssfl.cli import app

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    return FORMULA.sub(_mathml, content)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "commands.md":
        return "\n".join([markdown, *_commands(typer.main.get_command(app), "hetero-ssfl")])
    if page.file.src_uri == "settings.md":
        return "\n".join([markdown, *_settings(griffe.load("hetero_ssfl.config.schema", search_paths=["src"]))])
    return markdown


def _mathml(found: re.Match[str]) -> str:
    tag, formula = found.groups()
    return str(convert(html.unescape(formula), display="inline" if tag == "span" else "block"))


def _commands(command: click.Command, name: str) -> Iterator[str]:
    """The help of a command, or of all commands of a group, as Markdown."""
    if isinstance(command, click.Group):
        for part, inner in command.commands.items():
            yield from _commands(inner, f"{name} {part}")
        return
    words, _, examples = (command.help or "").partition("\nExample")
    yield f"\n## {name.removeprefix('hetero-ssfl ')}\n\n{words}\n\n```sh"
    yield from (line.strip() for line in examples.splitlines()[1:])
    yield "```\n\n| option | meaning |\n|---|---|"
    context = click.Context(command, info_name=name)
    for parameter in command.params:
        usage = ", ".join(parameter.opts) if isinstance(parameter, click.Option) else parameter.make_metavar(context)
        yield f"| `{usage}` | {getattr(parameter, 'help', None) or ''} |"


def _settings(schema: Any) -> Iterator[str]:
    """A table for each section of a config, with the words that stand below each setting in the code."""
    sections = {"": schema["Config"]}
    for key, field in schema["Config"].attributes.items():
        if str(field.annotation) in schema.classes:
            sections[key] = schema[str(field.annotation)]
    for name, section in sections.items():
        yield f"\n## {f'[{name}]' if name else 'Top level'}\n\n{section.docstring.value if section.docstring else ''}\n"
        yield "| setting | default | meaning |\n|---|---|---|"
        for key, field in section.attributes.items():
            if key not in sections and not key.startswith("model_"):
                choices = " ".join(f"`{choice}`" for choice in re.findall(r"'([\w-]+)'", str(field.annotation)))
                words = " ".join(field.docstring.value.split()) if field.docstring else ""
                yield f"| `{key}` | `{field.value}` | {choices}{'. ' if choices and words else ''}{words} |"

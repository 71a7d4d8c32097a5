"""The generated part of the reference: a Markdown extension that the site is built with.

A page of docs/reference says what it describes, and the code says the rest:

    <!-- commands -->                          the list of commands
    <!-- command: serve -->                    the help of `octavo serve` and of its subcommands
    <!-- names: octavo: apply_ restore_ -->    these names of a module, by mkdocstrings
    <!-- names: octavo.ops -->                 every name in its __all__
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

import octavo
from octavo.cli.main import COMMANDS

_COMMAND = re.compile(r"<!-- command: ([\w-]+) -->")
_COMMANDS = "<!-- commands -->"
_NAMES = re.compile(r"<!-- names: ([\w.]+)(?:: ([\w\s]+))? -->")


def expand(text: str) -> str:
    """The page with what the code says in place of its marks."""
    if _COMMANDS in text:
        rows = [f"- [`octavo {row.name}`]({row.name}.md): {_escape(row.help)}" for row in COMMANDS]
        text = text.replace(_COMMANDS, "\n".join(rows))
    text = _COMMAND.sub(lambda mark: "\n".join(_describe_row(mark[1])), text)
    return _NAMES.sub(lambda mark: "\n".join(_directives(mark)), text)


def named(text: str) -> set[str]:
    """The Python names that a page's marks describe, such as octavo.apply_."""
    return {f"{mark[1]}.{name}" for mark in _NAMES.finditer(text) for name in _names(mark)}


def _names(mark: re.Match[str]) -> list[str]:
    if mark[2]:
        return mark[2].split()
    text = (_folder(mark[1]) / "__init__.py").read_text(encoding="utf-8")
    listed = re.search(r"^__all__ = (\[.*?\])", text, flags=re.DOTALL | re.MULTILINE)
    if listed is None:
        raise ValueError(f"expected a list __all__ in {mark[1]}")
    return [str(name) for name in ast.literal_eval(listed[1])]


def _folder(module: str) -> Path:
    return Path(octavo.__file__).parents[1].joinpath(*module.split("."))


def _directives(mark: re.Match[str]) -> Iterator[str]:
    """mkdocstrings' lines for each name; it reads the code and imports nothing."""
    module = mark[1]
    for name in _names(mark):
        # octavo.ops.attention is a function and the module that has it; mkdocstrings takes the
        # module.
        is_module = (_folder(module) / f"{name}.py").exists()
        yield f"::: {module}.{name}.{name}" if is_module else f"::: {module}.{name}"
        yield f"    options:\n      heading: {module}.{name}\n      toc_label: {name}\n"


def _describe_row(name: str) -> Iterator[str]:
    row = next((row for row in COMMANDS if row.name == name), None)
    if row is None:
        raise ValueError(f"expected a command in <!-- command: {name} -->; octavo has none")
    yield from _describe(row.load(), f"octavo {name}", level=1)


def _describe(command: Any, title: str, level: int) -> Iterator[str]:
    """A command's help, usage, arguments and options, then those of its subcommands."""
    if level > 1:
        yield f"{'#' * level} {title}\n"
    for paragraph in (command.help or "").split("\n\n"):
        example = paragraph.strip().removeprefix("\b").strip()
        is_example = example.startswith("octavo ")
        yield f"```console\n$ {example}\n```\n" if is_example else f"{_escape(example)}\n"
    context = command.context_class(command, info_name=title)
    usage = " ".join([title, *command.collect_usage_pieces(context)])
    yield f"```text\nUsage: {usage}\n```\n"
    for kind, heading in (("argument", "Arguments"), ("option", "Options")):
        records = [
            record
            for parameter in command.get_params(context)
            if parameter.param_type_name == kind and (record := parameter.get_help_record(context))
        ]
        if records:
            yield f"**{heading}**\n"
            yield from (
                f"- `{names}`: {_escape(text)}" if text else f"- `{names}`"
                for names, text in records
            )
            yield ""
    for child in getattr(command, "commands", {}).values():
        yield from _describe(child, f"{title} {child.name}", level=level + 1)


def _escape(text: str) -> str:
    """Plain text for Markdown: nothing in it is markup."""
    return re.sub(r"([\\`*_{}\[\]#])", r"\\\1", text).replace("<", "&lt;")


class _Expander(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return expand("\n".join(lines)).split("\n")


class ReferenceExtension(Extension):
    """Expands the marks before any other part of Markdown sees the page."""

    def extendMarkdown(self, md: Markdown) -> None:  # the name that Markdown calls
        md.preprocessors.register(_Expander(md), "octavo-reference", 1000)


def makeExtension(**options: Any) -> ReferenceExtension:
    """What Markdown calls to load the extension."""
    return ReferenceExtension(**options)

"""Tables and sections as Markdown, for README, docs and issues."""

import re
from collections.abc import Sequence

from octavo.measure.report.html import Section
from octavo.measure.report.tables import Table


def to_markdown(table: Table) -> str:
    """The table without its caption; numbers to the right."""
    rule = ["---:" if is_numeric else "---" for is_numeric in table.numeric]
    rows = [table.header, rule, *table.texts()]
    return "\n".join("| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows)


def sections_markdown(sections: Sequence[Section], *, title: str, summary: str = "") -> str:
    """A page of sections: texts, links, tables; what plots and pictures show is said in words."""
    parts = [f"# {title}", *([summary] if summary else [])]
    for section in sections:
        parts += [f"## {section.title}", *section.paragraphs]
        if section.links:
            lines = [f"- [{_plain(link.text)}](#{_anchor(link.to)})" for link in section.links]
            parts.append("\n".join(lines))
        parts += [f"Plot: {figure.caption}" for figure in section.figures]
        parts += [f"Picture: {sheet.caption}" for sheet in section.sheets]
        for table in section.tables:
            parts += [f"**{table.caption}**", to_markdown(table)]
    return "\n\n".join(parts) + "\n"


def _anchor(title: str) -> str:
    """The anchor that a heading has on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _plain(text: str) -> str:
    return text.replace("[", "(").replace("]", ")")


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")

"""Tables as Markdown, for README and docs."""

from octavo.measure.report.tables import Table


def to_markdown(table: Table) -> str:
    """The table without its caption; numbers to the right."""
    rule = ["---:" if is_numeric else "---" for is_numeric in table.numeric]
    rows = [table.header, rule, *table.texts()]
    return "\n".join("| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")

"""Tables on the terminal."""

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from octavo.cli.console import out

if TYPE_CHECKING:
    from octavo.measure.report.tables import Table


def print_table(table: "Table") -> None:
    """Print a table: numbers to the right, text to the left, long text folded."""
    shown = RichTable(title=table.caption, title_justify="left", box=box.SIMPLE)
    for head, is_numeric in zip(table.header, table.numeric, strict=True):
        shown.add_column(head, justify="right" if is_numeric else "left", overflow="fold")
    for row in table.texts():
        shown.add_row(*map(Text, row))
    out.print(shown)

"""Tables on the terminal."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from octavo.cli.console import out

if TYPE_CHECKING:
    from octavo.measure.bench.benchmark import Objection
    from octavo.measure.report.tables import Table

_LONG = 30  # cells beyond this many characters may be folded
_WIDE = 160  # columns of a file or a pipe, which have no edge to fold at


def print_table(table: "Table") -> None:
    """Print a table: numbers to the right, text to the left, long text folded."""
    shown = RichTable(title=table.caption, title_justify="left", box=box.SIMPLE)
    texts = table.texts()
    for index, head in enumerate(table.header):
        longest = max((len(row[index]) for row in texts), default=0)
        justify = "right" if table.numeric[index] else "left"
        shown.add_column(head, justify=justify, overflow="fold", no_wrap=longest <= _LONG)  # type: ignore[arg-type]
    for row in texts:
        shown.add_row(*map(Text, row))
    console = out if out.is_terminal else Console(file=out.file, width=_WIDE)
    console.print(shown)


def print_parts(parts: "Iterable[str | Table]") -> None:
    """Print lines and tables as they come."""
    for part in parts:
        if isinstance(part, str):
            out.print(part, soft_wrap=True)
        else:
            print_table(part)


def print_objections(objections: "Iterable[Objection]") -> None:
    """Print who could not take part in a benchmark of models, and why; nothing if all could."""
    from octavo.measure.report.tables import Table

    rows = tuple(dict.fromkeys((o.name, o.operands, o.reason) for o in objections))
    if rows:
        header = ("impl", "recipe", "why not")
        print_table(Table(caption="Not measured here", header=header, rows=rows))

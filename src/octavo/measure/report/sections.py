"""How records of a kind become sections of a page: by a description, or by a function."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.measure.records import Measurement
from octavo.measure.report.html import Section, Sheet
from octavo.measure.report.plots import Figure
from octavo.measure.report.tables import Key, filled_table, grouped, newest

Rows = Sequence[Measurement]


@dataclass(frozen=True)
class Part:
    """A part of a page that a function makes.

    Attributes:
        ops: The ops whose records it shows.
        needs: The names that a record must have to be shown.
        make: Turns all of these records into sections.
    """

    ops: tuple[str, ...]
    needs: tuple[str, ...]
    make: Callable[[Rows], list[Section]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A part of a page by description: a section for each machine and value of `by`, with a table.

    Texts have names of `by` and {machine} in braces, or are functions of the rows.

    Attributes:
        ops: The ops whose records it shows.
        needs: The names that a record must have to be shown.
        by: What the records of a section have in common.
        rows: What tells the rows of a section apart; of records that are alike the newest counts.
            A function chooses the rows by itself.
        caption: Of the table.
        columns: Of the table; those that no row fills are left out.
        heads: Words over columns in place of their usual ones.
        headline: The result in one sentence, for the summary.
    """

    ops: tuple[str, ...]
    needs: tuple[str, ...]
    by: tuple[str, ...] = ("model",)
    rows: tuple[str, ...] | Callable[[Rows], Rows] = ()
    title: str | Callable[[Rows], str]
    text: str | Callable[[Rows], str] = ""
    caption: str | Callable[[Rows], str]
    columns: tuple[str, ...]
    heads: Mapping[str, str] = field(default_factory=dict)
    headline: Callable[[Rows], str] = lambda rows: ""
    figures: Callable[[Rows], Iterable[Figure]] = lambda rows: ()
    sheets: Callable[[Rows], Iterable[Sheet]] = lambda rows: ()

    def make(self, records: Rows) -> list[Section]:
        """The sections of all of these records."""
        return [self._section(key, own) for key, own in grouped(records, *self.by).items()]

    def _section(self, key: Key, records: Rows) -> Section:
        rows = self.rows(records) if callable(self.rows) else newest(records, *self.rows)
        names = dict(zip(("machine", *self.by), key, strict=True))
        title, text, caption = (
            said(rows) if callable(said) else said.format_map(names)
            for said in (self.title, self.text, self.caption)
        )
        table = filled_table(rows, caption=caption, columns=self.columns, heads=self.heads)
        return Section(
            title=title,
            text=text,
            headline=self.headline(rows),
            figures=tuple(self.figures(rows)),
            tables=(table,),
            sheets=tuple(self.sheets(rows)),
        )


def missing_names(part: Part | Kind, record: Measurement) -> list[str]:
    """The names that a record would need for this part to show it."""
    return [name for name in part.needs if record.get(name) is None]

"""Parts of a page as data: which records each shows, how they are grouped, and what is drawn."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.measure.records import Measurement
from octavo.measure.report.plots import Figure, Point, points
from octavo.measure.report.tables import Table, beside_ours, filled_table, grouped, newest

Rows = Sequence[Measurement]
Said = str | Callable[[Rows], str]  # a text, or what makes it of the rows
Figures = Callable[[Rows], Iterable[Figure]]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A wide image as a data URL, a sentence about it, and words in its place: what is on it."""

    caption: str
    alt: str
    url: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, what to say about it (paragraphs between blank lines), and what it shows.

    group: the heading that it stands under, such as the machine that all of it was measured on.
    headline: its result in one sentence, which is read before the section is unfolded. is_open:
    whether it is unfolded.
    """

    title: str
    group: str = ""
    text: str = ""
    headline: str = ""
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    sheets: tuple[Sheet, ...] = ()
    is_open: bool = False

    @property
    def paragraphs(self) -> list[str]:
        """The text, cut at blank lines."""
        return [part.strip() for part in self.text.split("\n\n") if part.strip()]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A part of a page by description: a section for each machine and value of `by`.

    Texts have names of `by` in braces, or are functions of the rows. Names of cases and values are
    words of one string.

    Attributes:
        ops: The ops whose records it shows.
        needs: The names that a record must have to be shown.
        by: What the records of a section have in common.
        rows: What tells the rows of a section apart; of records that are alike the newest counts.
            A function chooses the rows by itself.
        caption: Of the table.
        columns: Of the table; those that no row fills are left out.
        heads: Words over columns in place of their usual ones.
        tables: Makes other tables than the one of `columns`.
        headline: The result in one sentence, of what no verdict is about.
    """

    ops: tuple[str, ...]
    needs: str
    by: str = "model"
    rows: str | Callable[[Rows], Rows] = ""
    title: Said
    text: Said = ""
    caption: Said = ""
    columns: str = ""
    heads: Mapping[str, str] = field(default_factory=dict)
    tables: Callable[[Rows], Iterable[Table]] | None = None
    headline: Callable[[Rows], str] = lambda rows: ""
    figures: Figures = lambda rows: ()
    sheets: Callable[[Rows], Iterable[Sheet]] = lambda rows: ()

    def make(self, records: Rows) -> list[Section]:
        """The sections of all of these records."""
        by = self.by.split()
        groups = grouped(beside_ours(records), *by).items()
        return [
            self._section(dict(zip(("machine", *by), key, strict=True)), own) for key, own in groups
        ]

    def missing_names(self, record: Measurement) -> list[str]:
        """The names that a record would need to be shown."""
        return [name for name in self.needs.split() if record.get(name) is None]

    def _section(self, names: Mapping[str, object], records: Rows) -> Section:
        rows = self.rows(records) if callable(self.rows) else newest(records, *self.rows.split())
        title, text, caption = (
            said(rows) if callable(said) else said.format_map(names)
            for said in (self.title, self.text, self.caption)
        )
        columns = self.columns.split()
        tables = self.tables or (
            lambda rows: [filled_table(rows, caption=caption, columns=columns, heads=self.heads)]
        )
        return Section(
            title=title,
            group=str(names["machine"]),
            text=text,
            headline=self.headline(rows),
            figures=tuple(self.figures(rows)),
            tables=tuple(tables(rows)),
            sheets=tuple(self.sheets(rows)),
        )


def dots(
    value: str,
    *,
    caption: Said,
    title: str,
    reach: Callable[[Mapping[str, float]], tuple[float, float]] = lambda values: (0.0, 0.0),
    name: str = "recipe",
    series: Callable[[Measurement], str] = lambda row: "",
    reference: float | None = None,
) -> Figures:
    """A point for each row that has this value, if any does; reach: of error bars, up and down."""

    def figures(rows: Rows) -> Iterator[Figure]:
        found: dict[str, list[Point]] = {}
        for row in rows:
            if value in row.values:
                point = Point(str(row.case[name]), row.values[value], *reach(row.values))
                found.setdefault(series(row), []).append(point)
        if found:
            words = caption(rows) if callable(caption) else caption
            yield points(found, caption=words, value_title=title, reference=reference)

    return figures


def either_side(error: str) -> Callable[[Mapping[str, float]], tuple[float, float]]:
    """Error bars as long as this value on both sides."""
    return lambda values: (values.get(error, 0.0), values.get(error, 0.0))

"""Records as rows and columns: which of them count, how names and numbers read, tables and files.

A name says its unit: `median_ms` reads "median (ms)". Numbers have four digits: 0.75 is "0.7500".
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from octavo.errors import ConfigError
from octavo.measure.records import Measurement, Scalar

Cell = Scalar | None
Key = tuple[Cell, ...]

MISSING = "–"
# What records of an engine say of its settings.
ENGINE_SETTINGS = ("compile", "cuda_graphs", "page_size", "max_num_batched_tokens")
_UNITS = {
    "_tokens_per_s": "tokens/s",
    "_gb_per_s": "GB/s",
    "_percent": "%",
    "_tflops": "TFLOP/s",
    "_bytes": "bytes",
    "_ms": "ms",
    "_us": "µs",
    "_db": "dB",
    "_s": "s",
}
_ACRONYMS = {"auc", "cpu", "e2el", "fp8", "gpu", "itl", "kv", "lpips", "psnr", "qkv", "rms", "sqnr"}
_ACRONYMS |= {"ssim", "tpot", "ttft"}
# Names whose ending is no unit: those of vLLM's files, and ratios.
_HEADS = {
    "auc_percent": "area under the curve (%)",
    "cache_ratio": "cache (× of the baseline)",
    "difference_high_points": "at most (points)",
    "difference_low_points": "at least (points)",
    "difference_percent": "difference (points)",
    "difference_points": "difference (points)",
    "difference_standard_error_percent": "± s.e. (points)",
    "measured_speedup": "measured (×)",
    "num_answers": "answers",
    "num_cut": "cut",
    "num_questions": "questions",
    "num_unparsed": "unparsed",
    "num_windows": "windows",
    "output_throughput": "output (tokens/s)",
    "output_throughput_gain": "gain (×)",
    "peak_bytes_ratio": "memory (× of the baseline)",
    "perplexity_ratio": "ratio",
    "perplexity_standard_error": "± s.e.",
    "predicted_speedup": "predicted (×)",
    "recovery_standard_error_percent": "± s.e. (%)",
    "shift_detectable_points": "detectable (points)",
    "shift_points": "shift (points)",
    "shift_p_value": "p",
    "repetition_standard_error_percent": "± of repetitions (%)",
    "request_goodput": "goodput (requests/s)",
    "request_throughput": "requests/s",
    "score_standard_error_percent": "± s.e. (%)",
    "speedup": "speed-up (×)",
    "total_token_throughput": "all (tokens/s)",
    "weight_bytes_ratio": "weights (× of the baseline)",
}
_CSV_FIRST = ("op", "impl", "date", "machine", "baseline")


def machine_name(record: Measurement) -> str:
    """The GPU that a record was measured on, or the CPU where there was none."""
    return record.machine.gpu or record.machine.cpu


def grouped(records: Sequence[Measurement], *names: str) -> dict[Key, list[Measurement]]:
    """The records by machine and by what they have under these names, in order of appearance."""
    found: dict[Key, list[Measurement]] = {}
    for record in records:
        key = machine_name(record), *map(record.get, names)
        found.setdefault(key, []).append(record)
    return found


def beside_ours(records: Sequence[Measurement]) -> list[Measurement]:
    """The records, in which another library's engine has the settings of ours in the same run.

    Tables and plots are made for each setting of the engine, and both belong into one.
    """
    ours: dict[Key, Measurement] = {}
    for record in records:
        if record.impl == "octavo":
            ours.setdefault((machine_name(record), record.command), record)
    found = []
    for record in records:
        own = ours.get((machine_name(record), record.command))
        if own is not None and record.impl == "vllm":
            settings = {name: own.case[name] for name in ENGINE_SETTINGS if name in own.case}
            record = replace(record, case={**record.case, **settings})
        found.append(record)
    return found


def newest(records: Sequence[Measurement], *names: str) -> list[Measurement]:
    """The newest record of each machine and value of `names` (of op, impl and case, if none)."""
    found: dict[object, Measurement] = {}
    for record in records:
        about: object = tuple(map(record.get, names))
        if not names:
            about = record.op, record.impl, tuple(sorted(record.case.items()))
        key = machine_name(record), about
        if key not in found or record.date >= found[key].date:
            found[key] = record
    return list(found.values())


def tokens_text(number: int) -> str:
    """A number of tokens as people say it: 8k for 8192, 1M for 1048576."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size and number % (size // 4) == 0:
            return f"{number / size:g}{unit}"
    return str(number)


def label(name: str) -> str:
    """A field's name in words, with the unit that its ending says."""
    if f"_{name}" in _UNITS:
        return _UNITS[f"_{name}"]
    unit = next((suffix for suffix in _UNITS if name.endswith(suffix)), "")
    words = name.removesuffix(unit).split("_")
    text = " ".join(word.upper() if word in _ACRONYMS else word for word in words if word)
    return f"{text} ({_UNITS[unit]})" if unit else text


def format_column(cells: Sequence[Cell]) -> list[str]:
    """The cells of one column as text; numbers with 4 digits unless all of them are whole."""
    numbers = [cell for cell in cells if isinstance(cell, int | float) and math.isfinite(cell)]
    is_whole = all(number == int(number) for number in numbers)
    return [_format(cell, is_whole) for cell in cells]


def _format(cell: Cell, is_whole: bool) -> str:
    match cell:
        case None:
            return MISSING
        case bool():
            return "yes" if cell else "no"
        case str():
            return cell
    if not math.isfinite(cell):
        return "NaN" if math.isnan(cell) else "∞" if cell > 0 else "−∞"
    text = f"{int(cell):,}" if is_whole and abs(cell) < 1e15 else _four_digits(cell)
    return text.replace("-", "−")


def _four_digits(number: float) -> str:
    if number == 0:
        return "0"
    exponent = math.floor(math.log10(abs(number)))
    if -4 <= exponent < 7:
        return f"{number:,.{max(0, 3 - exponent)}f}"
    return f"{number:.3e}"


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A caption, the heads of the columns, and rows of cells; None is a cell without a value."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.header) for row in self.rows):
            raise ConfigError(f"every row of {self.caption!r} must have {len(self.header)} cells")

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column, whether it holds numbers."""
        return tuple(
            any(map(_is_number, cells)) and all(c is None or _is_number(c) for c in cells)
            for _, *cells in zip(self.header, *self.rows, strict=True)
        )

    def texts(self) -> list[tuple[str, ...]]:
        """The rows as text, numbers formatted column by column."""
        columns = zip(*self.rows, strict=True)
        return list(zip(*map(format_column, columns), strict=True))


def from_records(
    records: Sequence[Measurement], *, caption: str, columns: Sequence[str] = ()
) -> Table:
    """One row per record; `columns` are names of fields, cases or values (all, if left out)."""
    names = list(columns) or all_names(records)
    rows = tuple(tuple(record.get(name) for name in names) for record in records)
    return Table(caption=caption, header=tuple(map(label, names)), rows=rows)


def filled_table(
    records: Sequence[Measurement],
    *,
    caption: str,
    columns: Sequence[str],
    heads: Mapping[str, str] = MappingProxyType({}),
) -> Table:
    """One row per record; a column is left out if no record has a value for it.

    heads: words over columns in place of their usual ones.
    """
    kept = [name for name in columns if any(record.get(name) is not None for record in records)]
    rows = tuple(tuple(record.get(name) for name in kept) for record in records)
    words = _HEADS | dict(heads)
    return Table(caption=caption, header=tuple(words.get(n, label(n)) for n in kept), rows=rows)


def pivot(
    records: Sequence[Measurement], *, caption: str, row: str, column: str, value: str
) -> Table:
    """One row per value of `row`, one column per value of `column`, `value` in the cells."""
    cells: dict[tuple[Cell, Cell], Cell] = {}
    for record in records:
        place = record.get(row), record.get(column)
        if place in cells:
            raise ConfigError(f"two records for {row}={place[0]!r}, {column}={place[1]!r}")
        cells[place] = record.get(value)
    across = list(dict.fromkeys(place[1] for place in cells))
    down = list(dict.fromkeys(place[0] for place in cells))
    return Table(
        caption=caption,
        header=(label(row), *format_column(across)),
        rows=tuple((name, *(cells.get((name, head)) for head in across)) for name in down),
    )


def all_names(records: Sequence[Measurement]) -> list[str]:
    """`op`, `impl`, then every case and every value of the records, in the order of appearance."""
    cases = dict.fromkeys(name for record in records for name in record.case)
    values = dict.fromkeys(name for record in records for name in record.values)
    return list(dict.fromkeys(["op", "impl", *cases, *values]))


def to_markdown(table: Table) -> str:
    """The table without its caption, for README, docs and issues; numbers to the right."""
    rule = ["---:" if is_numeric else "---" for is_numeric in table.numeric]
    rows = [table.header, rule, *table.texts()]
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in escaped)


def to_csv(records: Sequence[Measurement]) -> str:
    """All records with all that they have, for spreadsheets; a cell without a value is empty."""
    names = [name for name in all_names(records) if name not in _CSV_FIRST]
    columns = (*_CSV_FIRST, *names, "command")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *([record.get(name) for name in columns] for record in records)])
    return text.getvalue()

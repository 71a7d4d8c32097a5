"""Names and numbers as readers want them: `median_ms` -> "median (ms)", 0.75 -> "0.7500"."""

import math
from collections.abc import Sequence

from octavo.measure.records import Scalar

Cell = Scalar | None

MISSING = "–"
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


def label(name: str) -> str:
    """A field's name in words, with the unit that its ending says."""
    if f"_{name}" in _UNITS:
        return _UNITS[f"_{name}"]
    unit = next((suffix for suffix in _UNITS if name.endswith(suffix)), "")
    words = name.removesuffix(unit).split("_")
    text = " ".join(word.upper() if word in _ACRONYMS else word for word in words if word)
    return f"{text} ({_UNITS[unit]})" if unit else text


def is_number(cell: Cell) -> bool:
    """Whether a cell belongs to the right of its column."""
    return isinstance(cell, int | float) and not isinstance(cell, bool)


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

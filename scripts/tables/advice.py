"""What `octavo advise` says, and how near its predictions are to what was measured."""

import io
from contextlib import redirect_stdout
from pathlib import Path

from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store
from octavo.measure.advise.gpus import find_gpu, tried_table
from octavo.measure.advise.measured import compare_all
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table, to_markdown

EXAMPLE = ("gpt-oss-like", "--gpu", "h200", "--context", "32k", "--concurrency", "8")


def advice(results: Path) -> str:
    """The command of EXAMPLE and what it prints."""
    buffer = io.StringIO()
    with redirect_stdout(buffer):
        code = run(make_app(COMMANDS), ["advise", *EXAMPLE, "--results", str(results)])
    if code:
        raise SystemExit(f"octavo advise {' '.join(EXAMPLE)} ended with {code}")
    lines = [line.rstrip() for line in buffer.getvalue().strip().splitlines()]
    text = "\n".join(
        line for line, before in zip(lines, ["x", *lines], strict=False) if line or before
    )
    return f"```text\n$ octavo advise {' '.join(EXAMPLE)}\n{text}\n```\n"


def tried(results: Path) -> str:
    """Versions and GPUs by how far octavo was tried with them; a test compares the records."""
    return f"{to_markdown(tried_table()).rstrip()}\n"


def predictions(results: Path) -> str:
    """Every speed-up of whole models that records have, beside its prediction."""
    found = compare_all(store.read(results), find_gpu("h200"))
    table = Table(
        caption="",
        header=("model", "what", "row", "predicted", "measured", "error"),
        rows=tuple(map(_row, found)),
    )
    known = [abs(x) for one in found if (x := one.values.get("error_percent")) is not None]
    told = f"{len(known)} of {len(found)} are predicted; the largest error is {max(known):.0f} %."
    return f"{to_markdown(table).rstrip()}\n\n{told}\n"


def _row(one: Measurement) -> tuple[str, ...]:
    about = (str(one.case["model"]), str(one.case["what"]), f"`{one.case['row']}`")
    measured = f"{one.values['measured_speedup']:.2f}×"
    if "predicted_speedup" not in one.values:
        return (*about, "– (host)", measured, "–")
    error = f"{round(one.values['error_percent']):+d} %".replace("+0", "0").replace("-", "−")
    return (*about, f"{one.values['predicted_speedup']:.2f}×", measured, error)

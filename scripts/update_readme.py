"""Write the tables of README.md from the records in results/.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. With --check nothing is written,
and a table that differs from its records is an error.

    python scripts/update_readme.py [--check]
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from octavo.atomic import write_atomically
from octavo.measure import store
from octavo.measure.report.markdown import to_markdown
from octavo.measure.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def accumulator() -> str:
    """What one-level accumulation loses on a real GPU, and how well the model predicts it."""
    records = store.read(ROOT / "results" / "accumulator_h200.jsonl")
    table = Table(
        caption="",
        header=(
            "keys",
            "relative error, one level",
            "relative error, two levels",
            "results where octavo's model differs",
        ),
        rows=tuple(
            (
                int(record.case["keys"]),
                f"{record.values['one_level_relative_rms']:.2g}",
                f"{record.values['two_level_relative_rms']:.2g}",
                f"{record.values['num_bits_differ']:.0f} of {record.values['num_results']:.0f}",
            )
            for record in records
        ),
    )
    return (
        f"FP8 sums of P·V on an {records[0].machine.gpu}, weights P ≥ 0 and values of mean 1, "
        "against float64. Added up in the tensor core alone (one level) long contexts fall apart; "
        f"octavo adds every tile of 128 keys in float32 (two levels).\n\n{to_markdown(table)}\n"
    )


TABLES: dict[str, Callable[[], str]] = {"accumulator": accumulator}


def fill(text: str) -> str:
    """The text with every table made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)


def main(arguments: list[str]) -> int:
    """Write README.md, or with --check compare it."""
    old = README.read_text(encoding="utf-8")
    new = fill(old)
    if "--check" not in arguments:
        write_atomically(README, new.encode())
        return 0
    if new != old:
        print("README.md differs from its records; do: python scripts/update_readme.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write the tables of README.md and docs/ from the records in results/.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. With --check nothing is written,
and a table that differs from its records is an error.

    python scripts/update_tables.py [--check]
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

# Who runs this file has its folder on the path; who loads it by its path has not.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from octavo.atomic import write_atomically
from tables import advice, decoders, host, kernels, serving, vision
from tables.images import images, modulation
from tables.needles import needles, retrieval
from tables.sensitivity import sensitivity
from tables.speeds import speeds, summary
from tables.steps import steps

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Each is given the folder of the records.
TABLES: dict[str, Callable[[Path], str]] = {
    "accumulator": kernels.accumulator,
    "advice": advice.advice,
    "attention": kernels.attention,
    "attention_grid": kernels.attention_grid,
    "attention_levels": kernels.attention_levels,
    "calls": host.calls,
    "chartqa": vision.chartqa,
    "decode": kernels.decode,
    "encoder": vision.encoder,
    "generate": decoders.generate,
    "host": host.ops,
    "images": images,
    "latency": serving.latency,
    "linear": serving.linear,
    "load": vision.load,
    "modulation": modulation,
    "needles": needles,
    "perplexity": decoders.perplexity,
    "predictions": advice.predictions,
    "prefill": kernels.prefill,
    "retrieval": retrieval,
    "sensitivity": sensitivity,
    "speeds": speeds,
    "steps": steps,
    "structures": kernels.structures,
    "summary": summary,
    "throughput": serving.throughput,
    "towers": vision.towers,
    "towers_eager": host.towers,
    "tried": advice.tried,
}
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def fill(text: str) -> str:
    """The text with every table made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]](RESULTS)}\n{m[3]}", text)


def main(arguments: list[str]) -> int:
    """Write the files, or with --check compare them."""
    changed = {path: fill(path.read_text(encoding="utf-8")) for path in FILES}
    changed = {path: text for path, text in changed.items() if text != path.read_text("utf-8")}
    if "--check" not in arguments:
        for path, text in changed.items():
            write_atomically(path, text.encode())
        return 0
    for path in changed:
        print(f"{path.name} differs from its records; do: python scripts/update_tables.py")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

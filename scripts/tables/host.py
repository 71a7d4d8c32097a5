"""Tables of what calls cost the host: single ops, and calls of generate()."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.report.tables import Table, to_markdown
from tables.common import grouped, newest


def host(results: Path) -> str:
    """One eager call of each op on tiny tensors, beside torch's own."""
    found = newest(store.read(results / "host_h200.jsonl"), lambda r: r.case["call"])
    rows = tuple(
        (r.case["call"], r.values["median_us"], r.values["over_linear"], r.values.get("budget"))
        for r in found
    )
    header = ("call", "µs", "over `F.linear`", "budget")
    text = f"Medians on the host of an {found[0].machine.gpu}, Python {found[0].machine.python}."
    return f"{text}\n\n{to_markdown(Table(caption='', header=header, rows=rows))}\n"


def calls(results: Path) -> str:
    """A token of generate(), called as users call it."""
    records = store.read(results / "generate_calls_h200.jsonl")
    found = newest(records, lambda r: (r.case["model"], r.case["prompt"], r.case["recipe"]))
    parts = []
    for group in grouped(found, lambda r: (r.case["model"], r.case["prompt"])):
        first = group[0]
        rows = tuple(
            (r.case["recipe"], r.values["median_ms"], r.values["speedup"], r.values["relative_rms"])
            for r in group
        )
        header = ("recipe", "ms a token", "speed-up", "error after two layers")
        parts.append(
            f"A model shaped like {first.case['model']} with random weights, a prompt of "
            f"{first.case['prompt']:,} tokens, on an {first.machine.gpu}.\n\n"
            f"{to_markdown(Table(caption='', header=header, rows=rows))}"
        )
    return "\n\n".join(parts) + "\n"

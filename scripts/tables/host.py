"""Tables of what calls cost the host: single ops, and whole models without graphs."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.report.tables import Table, to_markdown
from tables.common import newest

_IMAGES = ("model", "images", "resolution")
_CALLS = ("model", "prompt", "new_tokens", "batch")


def ops(results: Path) -> str:
    """One eager call of each op on tiny tensors, beside torch's own."""
    found = newest(store.read(results / "host" / "ops_h200.jsonl"), lambda r: r.case["call"])
    rows = tuple(
        (r.case["call"], r.values["median_us"], r.values["over_linear"], r.values.get("budget"))
        for r in found
    )
    header = ("call", "µs", "over `F.linear`", "budget")
    text = f"Medians on the host of an {found[0].machine.gpu}, Python {found[0].machine.python}."
    return f"{text}\n\n{to_markdown(Table(caption='', header=header, rows=rows))}\n"


def towers(results: Path) -> str:
    """Vision towers, called eagerly."""
    records = store.read(results / "host" / "encoder_h200.jsonl")
    found = newest(records, lambda r: tuple(r.case[name] for name in (*_IMAGES, "recipe")))
    rows = tuple(
        (
            f"{r.case['model']}, {r.case['images']} × {r.case['resolution']}",
            f"{r.case['recipe']} ({r.impl})",
            r.values["median_ms"],
            r.values["speedup"],
            r.values["tower_relative_rms"],
        )
        for r in found
    )
    header = ("tower and images", "recipe", "ms", "speed-up", "error of the result")
    text = f"On an {found[0].machine.gpu}, random weights."
    return f"{text}\n\n{to_markdown(Table(caption='', header=header, rows=rows))}\n"


def calls(results: Path) -> str:
    """A token of generate(), called eagerly; nothing while there are no records."""
    path = results / "host" / "generate_h200.jsonl"
    records = store.read(path) if path.exists() else []
    found = newest(records, lambda r: tuple(r.case[name] for name in (*_CALLS, "recipe")))
    if not found:
        return ""
    rows = tuple(
        (
            f"{r.case['model']}, {r.case['batch']} × {int(r.case['prompt']):,}",
            r.case["recipe"],
            r.values["median_ms"],
            r.values["speedup"],
            r.values["relative_rms"],
        )
        for r in found
    )
    header = ("model and prompts", "recipe", "ms a token", "speed-up", "error of two layers")
    text = f"On an {found[0].machine.gpu}, random weights."
    return f"{text}\n\n{to_markdown(Table(caption='', header=header, rows=rows))}\n"

"""Tables about kernels: attention, decoding, and how the tensor core adds up."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement
from octavo.measure.report.attention_grid import grid_tables
from octavo.measure.report.kernels import OWN_IMPLS
from octavo.measure.report.tables import MISSING, Table, newest, to_markdown
from tables.common import fastest, grouped

_LEVEL_SIZE = ("shape", "causal", "value_mean")


def accumulator(results: Path) -> str:
    """What one-level accumulation loses on a real GPU, and how well the model predicts it."""
    records = store.read(results / "accumulator_h200.jsonl")
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


def attention(results: Path) -> str:
    """FP8 attention by head_dim, beside the others."""
    found = [r for r in store.read(results / "kernels_h200.jsonl") if r.op == "attention"]
    columns = {
        "octavo, gluon": ("gluon", "FP8"),
        "octavo, triton": ("triton", "FP8"),
        "fastest BF16": (None, "BF16"),
        "FA3 FP8, two levels": ("vllm-fa3", "FP8"),
        "FA3 FP8, one level": ("fa3-fwd", "FP8"),
        "cuDNN FP8, FP8 result": ("cudnn", "FP8"),
    }
    rows = []
    for shape in dict.fromkeys(str(r.case["shape"]) for r in found):
        of_shape = [r for r in found if r.case["shape"] == shape]
        causal = ", causal" if of_shape[0].case["causal"] else ""
        cells = [_rate(of_shape, impl, operands) for impl, operands in columns.values()]
        rows.append((f"{shape}{causal}", *cells))
    table = Table(caption="", header=("", *columns), rows=tuple(rows))
    return (
        "Milliseconds and TFLOP/s at the real head_dim, operands quantized beforehand, peers "
        f"timed in turn on an {found[0].machine.gpu}.\n\n{to_markdown(table)}\n"
    )


def attention_grid(results: Path) -> str:
    """FP8 attention at many shapes, over the fastest of the others."""
    found = newest(store.read(results / "attention_grid_h200.jsonl"))
    tables = [f"\n{table.caption}:\n\n{to_markdown(table)}\n" for table in grid_tables(found)]
    return (
        "32,768 tokens as sequences of one length, the tokens of each above the columns; operands "
        "quantized beforehand, all participants timed in turn on an "
        f"{found[0].machine.gpu}. octavo is what `ops.attention` chooses by itself. More than 1: "
        f"octavo is faster; –: nobody else takes the shape.\n{''.join(tables)}"
    )


def attention_levels(results: Path) -> str:
    """What sums that move to float32 never, late and after every tile cost and lose."""
    found = newest(store.read(results / "attention_levels_h200.jsonl"))
    columns = dict.fromkeys((r.case["promote_every"], r.impl) for r in found)
    rows = []
    for of_shape in grouped(found, lambda r: tuple(map(r.case.get, _LEVEL_SIZE))):
        shape, is_causal, mean = map(of_shape[0].case.get, _LEVEL_SIZE)
        own = {(r.case["promote_every"], r.impl): r for r in of_shape}
        least = fastest([r for r in of_shape if r.case["promote_every"] == "none"])
        cells = (_level(own.get(column), least) for column in columns)
        rows.append((f"{shape}{', causal' if is_causal else ''}", f"{mean:g}", *cells))
    words = {"none": "one level", 1: "every tile"}
    names = (f"{words.get(every, f'every {every} tiles')}, {impl}" for every, impl in columns)
    table = Table(caption="", header=("", "mean of V", *names), rows=tuple(rows))
    return (
        "Milliseconds of FP8 attention, × those of one level, and the relative error against "
        "float64, by how often the sum of P·V moves from the tensor core to float32; in bold what "
        "`ops.attention` chooses by itself. Queries, keys and values are normal, those of mean 1 "
        f"around 1. On an {found[0].machine.gpu}.\n\n{to_markdown(table)}\n"
    )


def _level(record: Measurement | None, one_level: Measurement) -> str:
    if record is None:
        return MISSING
    ms, error = (record.values[name] for name in ("median_ms", "relative_rms"))
    text = f"{ms:.2f}, {ms / one_level.values['median_ms']:.2f}×, {error:.2g}"
    return f"**{text}**" if record.case["is_selected"] else text


def prefill(results: Path) -> str:
    """Chunks of prompts after cached tokens: octavo's FP8 beside the fastest of others."""
    records = store.read(results / "kernels_h200.jsonl")
    found = newest([r for r in records if r.op == "prefill_attention"])
    cells: dict[str, dict[int, str]] = {}
    for of_shape in grouped(found, lambda r: r.case["shape"]):
        new, _, cached, *layer = str(of_shape[0].case["shape"]).split()
        row = cells.setdefault(f"{int(new):,} new, {' '.join(layer)}", {})
        row[int(cached)] = _over_others(of_shape)
    columns = sorted({cached for row in cells.values() for cached in row})
    header = ("", *(f"after {cached:,}" for cached in columns))
    rows = (
        (name, *(row.get(cached, MISSING) for cached in columns)) for name, row in cells.items()
    )
    table = Table(caption="", header=header, rows=tuple(rows))
    return (
        "Milliseconds of octavo's FP8 attention over FP8 pages, gathering included, and how many "
        "times as fast it is as the fastest BF16 / the fastest other FP8. On an "
        f"{found[0].machine.gpu}.\n\n{to_markdown(table)}\n"
    )


def _over_others(records: list[Measurement]) -> str:
    fp8 = [r for r in records if r.case["operands"] == "FP8"]
    own = fastest([r for r in fp8 if r.impl in OWN_IMPLS]).values["median_ms"]
    rivals = [r for r in records if r not in fp8], [r for r in fp8 if r.impl not in OWN_IMPLS]
    ratios = (f"{fastest(r).values['median_ms'] / own:.2f}" if r else MISSING for r in rivals)
    return f"{own:.3g} ({' / '.join(ratios)})"


def _rate(records: list[Measurement], impl: str | None, operands: str) -> str:
    """Time and rate of an implementation, or of the fastest one; empty where it took no part."""
    found = [r for r in records if r.case["operands"] == operands and impl in (None, r.impl)]
    if not found:
        return ""
    record = fastest(found)
    return f"{record.values['median_ms']:.2f}, {record.tflops:.0f}"


def structures(results: Path) -> str:
    """What the inside of Hopper's kernel was tried to be, and how long each took."""
    records = store.read(results / "attention_structures_h200.jsonl")
    columns = [(head_dim, 8192, False) for head_dim in (64, 72, 96, 128)] + [(128, 32768, True)]
    rows = []
    for structure in dict.fromkeys(str(r.case["structure"]) for r in records):
        if structure.count(";") > 1:
            continue
        of_it = [r for r in records if r.case["structure"] == structure]
        cells = []
        for column in columns:
            case = ("head_dim", "length", "causal")
            found = [r for r in of_it if tuple(r.case[key] for key in case) == column]
            cells.append(f"{fastest(found).values['median_ms']:.3f}" if found else "")
        rows.append((structure, *cells))
    header = ("", "64", "72", "96", "128", "128, causal, 32k, heads 32/8")
    table = Table(caption="", header=header, rows=tuple(rows))
    return (
        "Milliseconds by head_dim, 8192 tokens and 16 heads, best settings of each, timed alone on "
        f"an {records[0].machine.gpu}.\n\n{to_markdown(table)}\n"
    )


def decode(results: Path) -> str:
    """Paged decoding, FP8 and BF16, beside FlashAttention-3."""
    found = [r for r in store.read(results / "kernels_h200.jsonl") if r.op == "decode_attention"]
    columns = [(i, o) for o in ("FP8", "BF16") for i in ("gluon", "triton", "vllm-fa3")]
    rows = []
    for shape in dict.fromkeys(str(r.case["shape"]) for r in found):
        of_shape = {(r.impl, r.case["operands"]): r for r in found if r.case["shape"] == shape}
        times = [
            f"{1e3 * of_shape[key].values['median_ms']:.1f}" if key in of_shape else MISSING
            for key in columns
        ]
        rows.append((shape, *times, f"{of_shape['gluon', 'FP8'].gb_per_s:,.0f}"))
    header = ("", *(f"{impl} {operands}" for impl, operands in columns), "GB/s, gluon FP8")
    table = Table(caption="", header=header, rows=tuple(rows))
    return f"Microseconds on an {found[0].machine.gpu}.\n\n{to_markdown(table)}\n"

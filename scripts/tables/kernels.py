"""Tables about kernels: attention, decoding, and how the tensor core adds up."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement
from octavo.measure.report.attention_grid import grid_tables
from octavo.measure.report.tables import Table, newest, to_markdown
from tables.common import fastest


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
        times = [f"{1e3 * of_shape[key].values['median_ms']:.1f}" for key in columns]
        rows.append((shape, *times, f"{of_shape['gluon', 'FP8'].gb_per_s:,.0f}"))
    header = ("", *(f"{impl} {operands}" for impl, operands in columns), "GB/s, gluon FP8")
    table = Table(caption="", header=header, rows=tuple(rows))
    return f"Microseconds on an {found[0].machine.gpu}.\n\n{to_markdown(table)}\n"

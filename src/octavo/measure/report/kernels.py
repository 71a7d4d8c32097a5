"""Kernels beside those of others: on a roofline, or over the bytes that they move."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from octavo.measure.records import Measurement
from octavo.measure.report.plots import Figure, Trace, axes, guide_line, log_ticks, markers
from octavo.measure.report.sections import Kind, Rows
from octavo.measure.report.tables import Cell, Table, format_column, label, machine_name

OWN_IMPLS = frozenset({"cuda", "gluon", "octavo", "reference", "selected", "triton"})
# Title -> ops. Records of one section have figures and tables of their own for each op.
TOPICS = {
    "Attention kernels": (
        "attention",
        "prefill_attention",
        "packed_attention",
        "encoder_attention",
    ),
    "Matrix products": ("scaled_mm", "matvec", "linear_gelu"),
    "Kernels that read and write": ("decode_attention", "append_kv", "quantize", "quantize_qkv"),
}
KERNEL_OPS = tuple(op for ops in TOPICS.values() for op in ops)
# What makes a size; other names of a case say how someone did it.
_SIZES = ("shape", "causal", "rotary", "bias", "load_s")
# Those of the same size differ in these, where FP8 has them; BF16 is compared with all of them.
_VARIANTS = ("scales", "scaling", "granularity")
# What they are compared with is a copy of the same bytes, not the same work in BF16.
_COPIES = ("append_kv", "quantize", "quantize_qkv")
_BF16 = ("octavo BF16", "others BF16")
_KINDS = ("octavo FP8", "others FP8", *_BF16)


@dataclass(frozen=True)
class Roof:
    """The most that a GPU does in a second; FP8's is None where it has no FP8 products."""

    gpu: str
    gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    source: str

    def tflops(self, operands: str) -> float:
        """Of "BF16" or "FP8"; FP8 of a GPU without it is that of BF16, which it would become."""
        return (self.fp8_tflops or self.bf16_tflops) if operands == "FP8" else self.bf16_tflops


@dataclass
class _Size:
    """The fastest record of each kind at one size and variant."""

    name: str
    variant: str
    fastest: dict[str, Measurement] = field(default_factory=dict)

    def best(self, *kinds: str) -> Measurement | None:
        """The fastest of these kinds; None if there is none."""
        found = [self.fastest[kind] for kind in kinds if kind in self.fastest]
        return min(found, key=_ms, default=None)

    def over(self, *kinds: str) -> float | None:
        """How many times faster octavo's FP8 is than the fastest of these kinds."""
        own, other = self.best("octavo FP8"), self.best(*kinds)
        return None if own is None or other is None else _ms(other) / _ms(own)


def _ms(record: Measurement) -> float:
    return record.values["median_ms"]


def kernel_kinds(roofs: Sequence[Roof] = ()) -> list[Kind]:
    """A part of a page for each topic: of every size the fastest of each kind.

    Where a GPU has no roof, none is drawn.
    """
    by_gpu = {roof.gpu: roof for roof in roofs}

    def text(rows: Rows) -> str:
        roof = by_gpu.get(machine_name(rows[0]))
        return (
            "Times are medians of calls over several sets of inputs, without launching. octavo's "
            "own kernels are beside those of others that ran here; a row is compared with the "
            f"fastest.{'' if roof is None else f' The roof: {roof.source}.'}"
        )

    def figures(rows: Rows) -> Iterable[Figure]:
        roof = by_gpu.get(machine_name(rows[0]))
        return (_figure(op, sizes, roof) for op, sizes in _by_op(rows).items())

    return [
        Kind(
            ops=ops,
            needs="shape operands median_ms",
            by="",
            title=title,
            text=text,
            headline=_headline,
            figures=figures,
            tables=lambda rows: (_table(op, sizes) for op, sizes in _by_op(rows).items()),
        )
        for title, ops in TOPICS.items()
    ]


def _by_op(rows: Rows) -> dict[str, list[_Size]]:
    """The sizes of each op, in the order of its topic."""
    ops = sorted({row.op for row in rows}, key=KERNEL_OPS.index)
    return {op: _sizes([row for row in rows if row.op == op]) for op in ops}


def _headline(rows: Rows) -> str:
    said = []
    for op, sizes in _by_op(rows).items():
        gains = [gain for size in sizes if (gain := size.over(*_BF16))]
        if gains and op not in _COPIES:
            least, most = f"{min(gains):.2f}", f"{max(gains):.2f}"
            times = most if least == most else f"{least} to {most}"
            said.append(f"{label(op)} in FP8 is {times} times as fast as the fastest BF16")
    return f"{'; '.join(said)}." if said else ""


def _sizes(records: Sequence[Measurement]) -> list[_Size]:
    """The sizes with their variants; BF16 has none, and is of all variants of its size."""
    found: dict[tuple[str, str], _Size] = {}
    for record in sorted(records, key=lambda record: _kind(record) in _BF16):
        kind, name = _kind(record), _size_name(record)
        is_bf16 = kind in _BF16
        variants = () if is_bf16 else _VARIANTS
        variant = ", ".join(str(record.case[n]) for n in variants if n in record.case)
        same = [size for size in found.values() if is_bf16 and size.name == name]
        for size in same or [found.setdefault((name, variant), _Size(name, variant))]:
            size.fastest[kind] = min(size.fastest.get(kind, record), record, key=_ms)
    return list(found.values())


def _kind(record: Measurement) -> str:
    who = "octavo" if record.impl in OWN_IMPLS else "others"
    return f"{who} {'FP8' if 'FP8' in str(record.case['operands']) else 'BF16'}"


def _size_name(record: Measurement) -> str:
    words = [str(record.case["shape"])]
    for name in _SIZES[1:]:
        value = record.case.get(name)
        if value is not None and value is not False:
            plain = "under load" if name == "load_s" else f"{name} {value}"
            words.append(name if value is True else plain)
    return ", ".join(words)


def _who(record: Measurement) -> str:
    """The implementation, and in what it differs from others."""
    others = record.case.keys() - {*_SIZES, *_VARIANTS, "operands"}
    notes = [f"{n.replace('_', ' ')} {x}" for n, x in record.case.items() if n in others]
    operands = str(record.case["operands"])
    notes += [operands] if operands not in ("FP8", "BF16") else []
    return f"{record.impl} ({', '.join(notes)})" if notes else record.impl


def _figure(op: str, sizes: Sequence[_Size], roof: Roof | None) -> Figure:
    """A roofline, or the bandwidth over the bytes where an op has no products."""
    records = [record for size in sizes for record in size.fastest.values()]
    is_roofline = all(record.tflops and record.gb_per_s for record in records)
    traces = [_trace(kind, number, sizes, is_roofline) for number, kind in enumerate(_KINDS)]
    data = [trace for trace in traces if trace["x"]]
    if is_roofline:
        what = "speed over arithmetic intensity; nearer to the roof is better"
        layout = axes("arithmetic intensity (FLOP per byte)", "speed (TFLOP/s)")
        layout["yaxis"] |= {"type": "log"} | log_ticks([y for trace in data for y in trace["y"]])
    else:
        what = "bytes per second over the bytes of a call; higher is better"
        layout = axes("bytes of a call (MB)", "bandwidth (GB/s)")
    layout["xaxis"] |= {"type": "log"} | log_ticks([x for trace in data for x in trace["x"]])
    layout["yaxis"]["rangemode"] = "tozero"
    roofs = [] if roof is None else _roof_lines(roof, data, is_roofline)
    return Figure(
        caption=f"{label(op)}: {what}. A point is the fastest of its kind at one size.",
        data=(*data, *roofs),
        layout=layout | {"showlegend": True},
        height_rem=26,
    )


def _trace(kind: str, number: int, sizes: Sequence[_Size], is_roofline: bool) -> Trace:
    """The points of a kind, of those sizes whose place is known."""
    x, y, text = [], [], []
    for size in sizes:
        if (record := size.fastest.get(kind)) is None:
            continue
        num_bytes = record.values.get("bytes", 0.0)
        place, speed = num_bytes / 1e6, record.gb_per_s
        if is_roofline:
            place, speed = record.values["flops"] / num_bytes, record.tflops
        if place and speed is not None:
            x.append(place)
            y.append(speed)
            text.append(escape(f"{_who(record)}, {size.name}"))
    trace = markers(kind, number, x, y)
    return trace | {"text": text, "hovertemplate": "%{text}<br>%{y:.4g}<extra></extra>"}


def _roof_lines(roof: Roof, data: Sequence[Trace], is_roofline: bool) -> list[Trace]:
    places = [x for trace in data for x in trace["x"]]
    low, high = min(places, default=1.0) / 2, max(places, default=1.0) * 2
    if not is_roofline:
        name, ends = f"memory, {roof.gb_per_s:,.0f} GB/s", [low, high]
        return [guide_line(name, ends, [roof.gb_per_s] * 2, width=2, dash="dash")]
    lines = []
    for operands, peak, dash in (
        ("FP8", roof.fp8_tflops, "dash"),
        ("BF16", roof.bf16_tflops, "dot"),
    ):
        if peak is not None:
            ridge = 1e3 * peak / roof.gb_per_s  # FLOP per byte where both limits meet
            x = sorted({low, max(low, min(ridge, high)), high})
            y = [min(peak, at * roof.gb_per_s / 1e3) for at in x]
            name = f"roof {operands}, {peak:,.0f} TFLOP/s"
            lines.append(guide_line(name, x, y, width=2, dash=dash))
    return lines


def _table(op: str, sizes: Sequence[_Size]) -> Table:
    is_product = any(record.tflops for size in sizes for record in size.fastest.values())
    unit = "TFLOP/s" if is_product else "GB/s"
    has_variants = any(size.variant for size in sizes)
    rows: list[tuple[Cell, ...]] = []
    for size in sizes:
        fastest = [size.best(*kinds) for kinds in (_KINDS[:1], _KINDS[1:2], _BF16)]
        about = (size.name, size.variant or None)[: 1 + has_variants]
        own_ms = None if fastest[0] is None else _ms(fastest[0])
        ratios = (size.over(*_BF16), size.over("others FP8"))
        rows.append((*about, *(_cell(record, is_product) for record in fastest), own_ms, *ratios))
    caption = f"{label(op)}: the fastest of each kind in {unit}, and octavo's FP8 over them"
    header = (*("size", "scales")[: 1 + has_variants], *_KINDS[:2], "BF16", "octavo FP8 (ms)")
    header += ("over BF16 (×)", "over others' FP8 (×)")
    return Table(caption=caption, header=header, rows=tuple(rows))


def _cell(record: Measurement | None, is_product: bool) -> str | None:
    if record is None:
        return None
    speed = record.tflops if is_product else record.gb_per_s
    return None if speed is None else f"{format_column([speed])[0]}, {_who(record)}"

"""How fast each op runs, from records of kernels: a cost for each call and a share of a ceiling.

time = fixed_us + work / (share · ceiling), where work is bytes or flops and the ceiling that of the
GPU (gpus.py). The two numbers are fitted to all records of an op with the same operands; where
there are none, they are stated here.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.measure.advise.gpus import REFERENCE, Gpu, find_gpu
from octavo.measure.records import Measurement
from octavo.ops.explain import explain

# Rows up to which a product reads its weight at the memory's speed.
FEW_ROWS = 16
# Implementations of attention of prompts with attention sinks: octavo's own, and of the peers one.
WITH_SINKS = frozenset({"gluon", "triton", "vllm-fa3"})
# (fixed_us, share) without records: rounded from those of an H200.
STATED: Mapping[str, tuple[float, float]] = {
    "product BF16 bytes": (6.0, 1.0),
    "product FP8 bytes": (7.0, 1.0),
    # A profile of a decode step: weights of 8, 34 and 117 MB take 4.1, 11 and 28 us.
    "matvec": (2.2, 0.99),
    "product BF16 flops": (1.0, 0.95),
    "product FP8 flops": (5.0, 0.95),
    "decode BF16": (6.0, 0.95),
    "decode FP8": (6.0, 0.95),
    "attention BF16": (0.0, 0.95),
    "attention FP8": (0.0, 0.6),
    "quantize": (3.0, 0.8),
    "copy": (2.0, 0.9),
}


@dataclass(frozen=True)
class Speed:
    """An op's cost for each call, and its share of a ceiling."""

    fixed_us: float
    share: float

    def ms(self, work: float, ceiling: float) -> float:
        """Of one call; work and ceiling in the same unit, the ceiling's for each second."""
        return self.fixed_us / 1e3 + 1e3 * work / (self.share * ceiling)


class Speeds:
    """The speeds of ops on one GPU.

    records: of any GPU; those of this one count, and where it has none, the H200's shares do.
    """

    def __init__(self, records: Sequence[Measurement], gpu: Gpu) -> None:
        is_own = any(row.op == "scaled_mm" and row.machine.gpu == gpu.name for row in records)
        self.gpu, self.source = gpu, gpu if is_own else find_gpu(REFERENCE)
        of_source = [row for row in records if row.machine.gpu == self.source.name]
        self._rows = [row for row in of_source if "model" not in row.case]
        self.has_records = bool(self._rows)
        self.is_borrowed = self.has_records and self.source.name != gpu.name
        self._found: dict[object, Speed] = {}
        self._selected: dict[tuple[str, str, int], str] = {}

    def product_ms(self, operands: str, rows: int, inputs: int, outputs: int) -> float:
        """A linear layer's product; of FP8 also what quantizes its input."""
        size = 1 if operands == "FP8" else 2
        num_bytes = size * inputs * outputs + 2.0 * rows * (inputs + outputs)
        read_ms = self._product(operands, True).ms(num_bytes, self._bytes)
        if rows <= FEW_ROWS:
            return read_ms
        flops = 2.0 * rows * inputs * outputs
        ms = self._product(operands, False).ms(flops, self._flops(operands))
        if operands == "FP8":
            ms += self.quantize_ms(3.0 * rows * inputs)
        return max(ms, read_ms)

    def matvec_ms(self, inputs: int, outputs: int) -> float:
        """A BF16 layer's product with the engine's only token."""
        return self._speed("matvec", "matvec", "triton").ms(2.0 * inputs * outputs, self._bytes)

    def decode_ms(self, operands: str, num_bytes: float) -> float:
        """Attention of one token for each sequence, over so many bytes of keys and values."""
        impl = self.selected("decode_attention", "BF16 to FP8" if operands == "FP8" else "BF16")
        speed = self._speed(f"decode {operands}", "decode_attention", impl, operands=operands)
        return speed.ms(num_bytes, self._bytes)

    def attention_ms(
        self, operands: str, flops: float, head_dim: int, impl: str | None = None
    ) -> float:
        """Attention of many queries; impl: "fastest", or one's name; None is octavo's own."""
        key = (operands, self.attention_impl(operands, flops, head_dim, impl), head_dim)
        if key not in self._found:
            # One-level accumulation is not what octavo would be beside.
            rows = self._of("attention", key[1], operands=operands)
            rows = [row for row in rows if "levels" not in row.case]
            found = self._fit(rows, f"attention {operands}", "flops", head_dim)
            # For a moment a kernel is beyond what products have; under load (encoder_ms) it is
            # slower, and a whole model is a load.
            self._found[key] = replace(found, share=min(found.share, 1.0))
        return self._found[key].ms(flops, self._flops(operands))

    def attention_impl(
        self,
        operands: str,
        flops: float,
        head_dim: int,
        impl: str | None = None,
        *,
        has_sinks: bool = False,
    ) -> str:
        """The name of what `attention_ms` takes as impl; has_sinks: the fastest of those with."""
        if impl is None:
            return self.selected("attention", operands, head_dim)
        if impl != "fastest":
            return impl
        names = {row.impl for row in self._of("attention", operands=operands)}
        able = sorted(names & WITH_SINKS if has_sinks else names) or ["none"]
        return min(able, key=lambda name: self.attention_ms(operands, flops, head_dim, name))

    def encoder_ms(self, operands: str, flops: float, head_dim: int, scaling: str) -> float:
        """Attention of a vision tower's layer; of FP8 with what quantizes q, k and v."""
        rows = [row for row in self._of("encoder_attention") if _head_dim(row) == head_dim]
        # A tower keeps the GPU busy: records under load are nearer to it.
        if any("load_s" in row.case for row in rows):
            rows = [row for row in rows if "load_s" in row.case]
        wanted = "static" if scaling == "static" else "dynamic with history"
        rows = [row for row in rows if row.case.get("operands") == operands]
        rows = [row for row in rows if row.case.get("scaling", wanted) == wanted]
        if not rows:
            impl = None if operands == "FP8" else "fastest"
            return self.attention_ms(operands, flops, head_dim, impl)
        by_impl = [[row for row in rows if row.impl == impl] for impl in {row.impl for row in rows}]
        fits = (self._fit(own, f"encoder {operands}", "flops") for own in by_impl)
        return min(fit.ms(flops, self._flops(operands)) for fit in fits)

    def quantize_ms(self, num_bytes: float) -> float:
        """What casts activations to FP8, reading and writing so many bytes."""
        return self._speed("quantize", "quantize", "triton").ms(num_bytes, self._bytes)

    def copy_ms(self, num_bytes: float, num_calls: int = 1) -> float:
        """What else reads and writes so many bytes."""
        speed = self._speed("copy", "quantize", "copy")
        return replace(speed, fixed_us=num_calls * speed.fixed_us).ms(num_bytes, self._bytes)

    @property
    def _bytes(self) -> float:
        return 1e9 * self.gpu.ceilings.gb_per_s

    def _flops(self, operands: str) -> float:
        return 1e12 * self.gpu.ceilings.tflops(operands)

    def _product(self, operands: str, is_few: bool) -> Speed:
        """BF16: torch's; FP8: the selected one, per token and channel."""
        impl, scales = "torch", "none"
        if operands == "FP8":
            impl = "selected"
            scales = "token by channel" + (", quantized in front" if is_few else "")
        kind = f"product {operands} {'bytes' if is_few else 'flops'}"

        def is_wanted(row: Measurement) -> bool:
            return (int(str(row.case["shape"]).split("x")[0]) <= FEW_ROWS) == is_few

        return self._speed(kind, "scaled_mm", impl, is_wanted, operands=operands, scales=scales)

    def selected(self, op: str, operands: str, head_dim: int = 128) -> str:
        """The implementation that octavo would run on this GPU; "none" where there is none."""
        if (op, operands, head_dim) not in self._selected:
            for row in explain(self.gpu.device, head_dim):
                impl = row.selection.impl if row.selection is not None else "none"
                self._selected[row.op, row.operands, head_dim] = impl
        return self._selected[op, operands, head_dim]

    def has_kernels(self, head_dim: int, **operands: str) -> bool:
        """Whether octavo has kernels on this GPU for all of these ops with their operands."""
        found = {self.selected(op, kind, head_dim) for op, kind in operands.items()}
        return not found & {"reference", "none"}

    def _of(self, op: str, impl: str | None = None, **case: str) -> list[Measurement]:
        """The records of an op and an implementation, with these values in their cases."""
        rows = [row for row in self._rows if row.op == op and impl in (None, row.impl)]
        return [row for row in rows if case.items() <= row.case.items()]

    def _speed(
        self,
        kind: str,
        op: str,
        impl: str,
        is_wanted: Callable[[Measurement], bool] = lambda row: True,
        **case: str,
    ) -> Speed:
        """That of the wanted ones of these records (`_of`)."""
        if kind not in self._found:
            rows = list(filter(is_wanted, self._of(op, impl, **case)))
            self._found[kind] = self._fit(rows, kind, "flops" if "flops" in kind else "bytes")
        return self._found[kind]

    def _fit(
        self, rows: Sequence[Measurement], kind: str, unit: str, head_dim: int | None = None
    ) -> Speed:
        """The two numbers of rows, by least squares of relative errors; stated ones without rows.

        With a head_dim the share is that of the nearest one, and the cost of a call one for all of
        them: most have records of one length only, which cannot tell the two apart.
        """
        if not rows:
            return Speed(*STATED[kind])
        ceilings = self.source.ceilings
        tflops = ceilings.tflops("FP8" if "FP8" in kind else "BF16")
        ceiling = 1e12 * tflops if unit == "flops" else 1e9 * ceilings.gb_per_s
        ms = np.array([row.values["median_ms"] for row in rows])
        work_ms = np.array([1e3 * row.values[unit] / ceiling for row in rows])  # at the ceiling
        sizes = np.array([_head_dim(row) if head_dim else 0 for row in rows])
        columns = sorted(set(sizes.tolist()))
        nearest = min(columns, key=lambda size: abs(math.log((size or 1) / (head_dim or 1))))
        if len({*zip(sizes.tolist(), work_ms.tolist(), strict=True)}) >= len(columns) + 2:
            shares = [(sizes == size) * work_ms / ms for size in columns]
            matrix = np.column_stack([1 / ms, *shares])
            fixed_ms, *slopes = np.linalg.lstsq(matrix, np.ones(len(ms)), rcond=None)[0].tolist()
            slope = slopes[columns.index(nearest)]
            if fixed_ms >= 0 and slope > 0:
                return Speed(1e3 * fixed_ms, 1 / slope)
        if len(columns) > 1:
            return self._fit([row for row in rows if _head_dim(row) == nearest], kind, unit)
        # Too few sizes, or no cost for each call to be seen: a share alone.
        return Speed(0.0, float(np.median(work_ms / ms)))


def _head_dim(row: Measurement) -> int:
    found = re.search(r"head_dim (\d+)", str(row.case.get("shape", "")))
    return int(found[1]) if found else 0

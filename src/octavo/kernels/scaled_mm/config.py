"""What the scaled_mm kernels can do, and how they are launched; no Triton here, and no GPU."""

from dataclasses import dataclass, replace

import torch

from octavo.kernels import tuning
from octavo.kernels.device import Device
from octavo.kernels.quantize.config import objection as quantize_objection
from octavo.numerics.formats import E5M2, is_fp8
from octavo.numerics.granularity import Granularity, PerBlock, PerTensor

# Triton 3.6 has bf16 matrix products from sm_80 on, and the FP8 type from sm_89 on.
MIN_CAPABILITY = (8, 0)
MIN_FP8_CAPABILITY = (8, 9)
# Up to so many rows the weight is streamed past them: reading it is what takes the time.
MAX_STREAM_ROWS = 64
# Up to so many tiles of 128 x 128 leave half of an H200 idle, whoever computes them; in deeper
# products torch splits K.
MAX_FEW_TILES, MAX_FEW_DEPTH = 64, 5120
# Tokens up to this width are quantized in front in one program's registers.
MAX_TOKEN_WIDTH = 32768
# The depth of one step of the tensor core's own accumulation (docs/explanation/numerics.md).
PROMOTED_DEPTH = 128


@dataclass(frozen=True)
class MatmulShape:
    """[rows, depth] by the transpose of [columns, depth]."""

    rows: int
    columns: int
    depth: int


@dataclass(frozen=True)
class TileConfig:
    """A tile of the result for each program, which may go on to others.

    num_parts: parts of the tile whose products are added up one after the other. group: rows of
    tiles that go together. programs_per_sm: 0 for one program per tile. is_flat: the loop over K
    runs on into the next tile. is_tma: tiles are copied in bulk where their rows allow it.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    num_parts: int = 2
    group: int = 8
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    is_flat: bool = True
    is_tma: bool = True


@dataclass(frozen=True)
class StreamConfig:
    """A tile of the weight's rows for each program, and a part of K if there are splits.

    is_dependent: starts while the activations are still being quantized. is_decoded_by_bits: for
    GPUs without the FP8 type. is_tma: as for TileConfig. prefetch: so many values of each of the
    weight's rows are on their way to the L2 cache before the activations are waited for.
    """

    block_m: int = 16
    block_n: int = 64
    block_k: int = 128
    group: int = 8
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    is_dependent: bool = False
    is_decoded_by_bits: bool = False
    is_tma: bool = False
    prefetch: int = 0


def objection(device: Device, *, is_fp8: bool, activation: Granularity | None) -> str | None:
    """Why the kernels cannot run a product on this device; None if they can.

    is_fp8: both operands are FP8 when they are multiplied. activation: how a is quantized first.
    """
    if device.capability is None:
        return f"Triton needs a CUDA GPU, got {device.name}"
    major, minor = device.capability
    if device.capability < MIN_CAPABILITY:
        return f"matrix products need compute capability 8.0 or newer, got {major}.{minor}"
    if is_fp8 and device.capability < MIN_FP8_CAPABILITY:
        return (
            f"FP8 by FP8 needs compute capability 8.9 or newer, got {major}.{minor}: leave the "
            "activation in bfloat16 or float16"
        )
    return None if activation is None else quantize_objection(device, activation)


def problem(shape: MatmulShape, width: int, *, is_fp8: bool) -> str | None:
    """What launch settings are tuned for: weights streamed past few rows."""
    if shape.rows > MAX_STREAM_ROWS or width or not is_fp8:
        return None
    rows = max(16, _power_of_two(shape.rows))
    return f"fp8 rows {rows} columns {shape.columns} depth {shape.depth}"


def choose(
    shape: MatmulShape, device: Device, width: int, *, is_fp8: bool
) -> TileConfig | StreamConfig:
    """The launch settings: tuned ones, or those by rule."""
    name = problem(shape, width, is_fp8=is_fp8)
    tuned = None if name is None else tuning.find("scaled_mm", name, device, StreamConfig)
    return tuned if tuned is not None else default(shape, device, width, is_fp8=is_fp8)


def default(
    shape: MatmulShape, device: Device, width: int, *, is_fp8: bool
) -> TileConfig | StreamConfig:
    """The launch settings by rule: a ladder without search, from figures of an H200.

    width: how many columns share a scale, 0 for all. is_fp8: both operands are FP8.
    """
    if not is_fp8:
        return _default_decoded(shape, device, width)
    if shape.rows <= MAX_STREAM_ROWS:
        return _default_stream(shape, device, width)
    block_k = _block_k(width)
    if not _has_tma(device) or shape.depth % 16 or width % block_k:
        # Pointers to every value take registers: half as many sums for each thread.
        return TileConfig(
            block_k=block_k,
            num_parts=1,
            num_warps=8,
            programs_per_sm=0,
            is_flat=False,
            is_tma=_has_tma(device),
        )
    num_tiles = -(-shape.rows // 128) * -(-shape.columns // 128)
    if width or num_tiles < 3 * device.num_sms:
        # Few tiles leave SMs idle, and scales of blocks take registers: smaller tiles.
        return TileConfig(
            block_m=64,
            block_k=block_k,
            num_parts=1,
            num_stages=4,
            programs_per_sm=0,
            is_flat=False,
        )
    return TileConfig(block_k=block_k)


def is_valid(config: TileConfig | StreamConfig, width: int, *, is_fp8: bool) -> bool:
    """Whether a launch with these settings computes the right sums."""
    sizes = (config.block_m, config.block_n, config.block_k, config.num_warps)
    if any(size < 1 or size & (size - 1) for size in sizes):
        return False
    if isinstance(config, TileConfig):
        return is_fp8 and config.num_parts in (1, 2) and config.block_k <= PROMOTED_DEPTH
    is_promoted = not is_fp8 or config.block_k <= PROMOTED_DEPTH or width == 0
    return is_promoted and config.num_splits >= 1


def candidates(
    shape: MatmulShape, device: Device, width: int, *, is_fp8: bool
) -> list[TileConfig | StreamConfig]:
    """Launch settings worth timing, the default first."""
    first = default(shape, device, width, is_fp8=is_fp8)
    others: list[TileConfig | StreamConfig]
    if isinstance(first, TileConfig):
        others = [replace(first, group=group) for group in (4, 16)]
        others += [TileConfig(block_k=first.block_k, is_tma=first.is_tma)]
        others += [replace(first, programs_per_sm=0, is_flat=False)]
    else:
        others = [
            replace(first, block_n=block_n, block_k=block_k, num_stages=stages, num_splits=splits)
            for block_n in (64, 128)
            for block_k in dict.fromkeys((first.block_k, 128, 256))
            for stages in (3, 4, 6, 8)
            for splits in dict.fromkeys((first.num_splits, 1, 2, 3, 4, 6))
            if _shared_bytes(block_n + first.block_m, block_k, stages) <= device.shared_bytes
            and 1 <= splits * -(-shape.columns // block_n) // device.num_sms <= 4
        ]
        others += [replace(first, prefetch=prefetch) for prefetch in (256, 512, 1024)]
    unique = list(dict.fromkeys([first, *others]))
    return [config for config in unique if is_valid(config, width, is_fp8=is_fp8)]


def _shared_bytes(num_rows: int, block_k: int, num_stages: int) -> int:
    """Shared memory of tiles of FP8 on their way, barriers aside."""
    return num_rows * block_k * num_stages + 1024


def work(shape: MatmulShape, a_bytes: int, out_bytes: int) -> tuple[int, int]:
    """Floating-point operations and bytes moved at least; a_bytes, out_bytes: of one value."""
    flops = 2 * shape.rows * shape.columns * shape.depth
    operands = shape.rows * shape.depth * a_bytes + shape.columns * shape.depth
    return flops, operands + shape.rows * shape.columns * out_bytes


def _default_stream(shape: MatmulShape, device: Device, width: int) -> StreamConfig:
    """Programs for every SM: by 64 columns each if those are enough, else by parts of K."""
    block_m = max(16, _power_of_two(shape.rows))
    num_tiles = -(-shape.columns // 64)
    has_dependents = (device.capability or (0, 0)) >= (9, 0)
    config = StreamConfig(block_m=block_m, block_k=_block_k(width), is_dependent=has_dependents)
    if 3 * num_tiles > 2 * device.num_sms:
        # 6144 columns are 96 programs: 8 stages keep as much of the weight on its way.
        is_few = num_tiles < 2 * device.num_sms and block_m <= 32 and _has_tma(device)
        return replace(config, num_stages=8 if is_few else 4)
    splits = min(2 * device.num_sms // num_tiles, shape.depth // 1024)
    is_deep = shape.depth >= 8192 and width == 0 and _has_tma(device)
    return replace(config, num_splits=max(1, splits), block_k=256 if is_deep else config.block_k)


def _default_decoded(shape: MatmulShape, device: Device, width: int) -> StreamConfig:
    """For a plain activation: tiles as large as its rows, parts of K where the tiles are few."""
    block_m = min(128, max(16, _power_of_two(shape.rows)))
    block_n = 64 if block_m < 64 else 128
    num_tiles = -(-shape.rows // block_m) * -(-shape.columns // block_n)
    splits = min(3 * device.num_sms // num_tiles, shape.depth // 1024, 8)
    return StreamConfig(
        block_m=block_m,
        block_n=block_n,
        block_k=min(128 if block_m < 64 else 64, _block_k(width)),
        num_splits=max(1, splits),
        num_warps=4 if block_m < 128 else 8,
        num_stages=3,
        is_decoded_by_bits=(device.capability or (0, 0)) < MIN_FP8_CAPABILITY,
    )


def _has_tma(device: Device) -> bool:
    return (device.capability or (9, 0)) >= (9, 0)  # without a GPU, the interpreter copies tiles


def _block_k(width: int) -> int:
    """Columns of one step: at most PROMOTED_DEPTH, in which no block of scales begins."""
    if width % PROMOTED_DEPTH == 0:
        return PROMOTED_DEPTH
    largest = width & -width  # the largest power of two that divides the width
    if largest >= 32:
        return largest
    return min(PROMOTED_DEPTH, max(32, _power_of_two(width)))


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def torch_objection(
    device: Device,
    shape: MatmulShape | None,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
    granularities: tuple[Granularity, Granularity],
    bias_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> str | None:
    """Why torch._scaled_mm cannot run a product, sizes aside if there is no shape; or None."""
    if device.capability is None:
        return f"torch._scaled_mm needs a CUDA GPU, got {device.name}"
    if device.capability < MIN_FP8_CAPABILITY:
        major, minor = device.capability
        return f"torch._scaled_mm needs compute capability 8.9 or newer, got {major}.{minor}"
    if not all(is_fp8(dtype) for dtype in dtypes):
        return f"torch._scaled_mm multiplies FP8 by FP8, got {dtypes[0]} by {dtypes[1]}"
    if dtypes == (E5M2.dtype, E5M2.dtype):
        return "torch._scaled_mm does not multiply e5m2 by e5m2"
    a, b = granularities
    if isinstance(a, PerBlock) or isinstance(b, PerBlock):
        return f"scales per tensor, token and channel are what it is used for, got {a} by {b}"
    is_per_row = not (isinstance(a, PerTensor) and isinstance(b, PerTensor))
    if is_per_row and device.capability != (9, 0):
        major, minor = device.capability
        return f"one scale for each row needs compute capability 9.0, got {major}.{minor}"
    if bias_dtype is not None and (out_dtype == torch.float32 or bias_dtype != out_dtype):
        return f"a bias must be bfloat16 or float16 as the result is, got {bias_dtype}"
    if shape is not None and (
        shape.rows == 0 or shape.depth == 0 or shape.columns % 16 or shape.depth % 16
    ):
        return (
            "expected some rows, and columns and depth that are multiples of 16, got "
            f"{shape.rows} rows, {shape.columns} columns and depth {shape.depth}"
        )
    return None


def torch_reluctance(
    shape: MatmulShape | None, granularities: tuple[Granularity, Granularity]
) -> str | None:
    """Why the Triton kernels should run a product that torch._scaled_mm can run; None if not.

    On an H200, 16 × 6144 × 4096 takes torch 18.4 µs per token by channel, the Triton kernel
    10.2 µs; per tensor torch takes 10.3 µs (results/kernels_h200.jsonl).
    """
    if shape is None or all(isinstance(one, PerTensor) for one in granularities):
        return None
    if shape.rows <= MAX_STREAM_ROWS:
        return f"up to {MAX_STREAM_ROWS} rows the Triton kernel reads the weight faster"
    num_tiles = -(-shape.rows // 128) * -(-shape.columns // 128)
    if num_tiles <= MAX_FEW_TILES and shape.depth <= MAX_FEW_DEPTH:
        return f"up to {MAX_FEW_TILES} tiles the Triton kernel is as fast, and costs the host less"
    return None

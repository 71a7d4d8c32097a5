"""What the decode kernels can do, and how they are launched; no Triton here, and no GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.cache.spec import PAGE_SIZES
from octavo.kernels.device import Device
from octavo.numerics.decode_plan import (
    COMBINE_BLOCKS,
    COMBINED_AT_ONCE,
    ITEM_BLOCKS,
    PlanSettings,
)
from octavo.numerics.formats import is_fp8

MIN_CAPABILITY = (8, 0)
GLUON_MIN_CAPABILITY = (8, 9)
PDL_MIN_CAPABILITY = (9, 0)
# One program makes the plan and has all sequences in its registers; the more there are, the longer
# it takes to compile.
MAX_SEQUENCES = 2**15
# Tiles are powers of two, and a warp's registers hold one tile of keys and one of values.
GLUON_HEAD_DIMS = (64, 128, 256)
MAX_HEAD_DIM = 256
# Bytes of keys that a warp has on their way; with as many of values, 128 of its registers.
TILE_BYTES = 8192
# Two programs of four warps fit one SM with this many registers for each thread.
MAX_REGISTERS = 255
# Values of partial results that a thread combines at once.
COMBINE_VALUES = 64


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """The sizes of one decode step over one layer's pages; no tensors, no data."""

    num_sequences: int
    q_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_pages: int
    q_dtype: torch.dtype
    page_dtype: torch.dtype
    has_token_scales: bool = False
    window: int | None = None

    @property
    def rows(self) -> int:
        """Queries of one KV head: those of its group, of every query token."""
        return self.num_heads // self.num_kv_heads * self.q_len


@dataclass(frozen=True, kw_only=True)
class GluonConfig:
    """A program's warps, the tokens of each warp's tile, and its queries (columns).

    programs_per_sm: how many fit one SM. combine_splits: partial results loaded at once.
    max_registers: what the compiler may use; told so, it loads earlier. use_pdl: programmatic
    dependent launch (sm_90 and newer), which starts the kernel before the one in front of it, such
    as append_kv, has ended.
    """

    tile_tokens: int
    columns: int
    num_warps: int
    programs_per_sm: int
    combine_splits: int
    max_registers: int | None = None
    use_pdl: bool = False

    @property
    def block_tokens(self) -> int:
        """Tokens that a program reads in one turn of its loop."""
        return self.tile_tokens * self.num_warps


@dataclass(frozen=True, kw_only=True)
class TritonConfig:
    """A program's tokens in one turn of its loop, its queries (columns of the plan) and warps."""

    block_tokens: int
    columns: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    combine_splits: int


Config = GluonConfig | TritonConfig


def objection(device: Device, *, head_dim: int | None) -> str | None:
    """Why the Triton kernel cannot serve a call; None if it can."""
    if device.capability is None:
        return f"Triton needs a CUDA GPU, got {device.name}"
    if device.capability < MIN_CAPABILITY:
        return f"expected compute capability 8.0 or newer, got {_version(device.capability)}"
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        return f"expected head_dim of at most {MAX_HEAD_DIM}, got {head_dim}"
    return None


def objection_to_gluon(
    device: Device,
    *,
    q_dtype: torch.dtype,
    page_dtype: torch.dtype | None,
    head_dim: int | None,
    page_size: int | None,
) -> str | None:
    """Why the Gluon kernel cannot serve a call; None if it can."""
    if device.capability is None:
        return f"Gluon needs a CUDA GPU, got {device.name}"
    if device.capability < GLUON_MIN_CAPABILITY:
        return f"expected compute capability 8.9 or newer, got {_version(device.capability)}"
    if head_dim is not None and head_dim not in GLUON_HEAD_DIMS:
        return f"expected head_dim 64, 128 or 256, got {head_dim}"
    if page_size is not None and page_size not in PAGE_SIZES:
        return f"expected page_size 16, 32, 64 or 128, got {page_size}"
    if page_dtype == torch.float32:
        return "expected FP8, bfloat16 or float16 pages, got float32"
    compute = torch.bfloat16 if page_dtype == torch.bfloat16 else torch.float16
    if q_dtype not in (torch.bfloat16, compute):
        return f"over {page_dtype} pages it computes in {compute}, too coarse for {q_dtype} queries"
    return None


def default(shape: DecodeShape, device: Device) -> TritonConfig:
    """The launch settings of the Triton kernel."""
    width = _power_of_two(shape.head_dim)
    # Tiles of float32 have neither the registers nor the shared memory for more.
    is_float32 = torch.float32 in (shape.q_dtype, shape.page_dtype) or (
        (shape.q_dtype, shape.page_dtype) == (torch.float16, torch.bfloat16)
    )
    columns = 16 if is_float32 else min(64, max(16, _power_of_two(shape.rows)))
    # FP8 tiles are twice as long for the same bytes; wide or many queries leave less room.
    is_wide = width > 128 or columns > 16 or is_float32
    is_short = shape.max_pages * shape.page_size <= 512
    is_long = is_fp8(shape.page_dtype) and not is_wide and not is_short
    short = 32 if is_float32 and width > 128 else 64
    return TritonConfig(
        block_tokens=128 if is_long else short,
        columns=columns,
        num_warps=4,
        # Without stages: an FP8 tile copied to shared memory as it is comes back byte by byte, and
        # more programs hide as much.
        num_stages=1,
        programs_per_sm=2 if is_long and width > 64 else 4,  # as many bytes on their way
        combine_splits=_combine_splits(columns, width, 4),
    )


def default_gluon(shape: DecodeShape, device: Device) -> GluonConfig:
    """The launch settings of the Gluon kernel: a ladder, by the sizes alone.

    Two warps leave more programs to balance and four fewer partial results to combine: four for
    few sequences of FP8, if they are long or one block alone.
    """
    # Sixteen columns of 256 values would not fit the registers.
    columns = 8 if shape.rows <= 8 or shape.head_dim > 128 else 16
    num_programs = shape.num_sequences * shape.num_kv_heads * -(-shape.rows // columns)
    max_tokens = shape.max_pages * shape.page_size
    is_few = 4 * num_programs <= device.num_sms and not 256 < max_tokens <= 2048
    num_warps = 4 if is_few and is_fp8(shape.page_dtype) else 2
    vector_bytes = shape.head_dim * shape.page_dtype.itemsize
    is_small = vector_bytes <= 64
    # Scales of tokens and sixteen columns do not fit the registers beside a whole tile.
    tile_bytes = TILE_BYTES // 2 if shape.has_token_scales and columns > 8 else TILE_BYTES
    return GluonConfig(
        tile_tokens=min(64, tile_bytes // vector_bytes),
        columns=columns,
        num_warps=num_warps,
        programs_per_sm=(12 if is_small else 8) // num_warps,
        combine_splits=_combine_splits(min(shape.rows, columns), shape.head_dim, num_warps),
        # Sixteen columns are close to the limit anyway; told of it, the compiler goes beyond.
        max_registers=None if is_small or columns > 8 else MAX_REGISTERS,
        use_pdl=(device.capability or (0, 0)) >= PDL_MIN_CAPABILITY,
    )


def is_valid(config: Config, shape: DecodeShape) -> bool:
    """Whether a launch with these settings computes the right result and can be compiled."""
    sizes = [config.num_warps, config.columns, config.block_tokens, config.combine_splits]
    if not all(size > 0 and size & (size - 1) == 0 for size in sizes):
        return False
    if isinstance(config, TritonConfig):
        return config.columns >= 16 and config.block_tokens >= 16
    fits = config.tile_tokens * shape.head_dim * shape.page_dtype.itemsize <= 2 * TILE_BYTES
    return config.columns in (8, 16) and 16 <= config.tile_tokens <= 64 and fits


def candidates(shape: DecodeShape, device: Device) -> list[GluonConfig]:
    """Settings of the Gluon kernel worth trying."""
    base = default_gluon(shape, device)
    programs = base.programs_per_sm * base.num_warps
    tried = [
        GluonConfig(
            tile_tokens=base.tile_tokens,
            columns=base.columns,
            num_warps=num_warps,
            programs_per_sm=programs // num_warps,
            combine_splits=base.combine_splits,
            max_registers=max_registers,
            use_pdl=base.use_pdl,
        )
        for num_warps in (2, 4, 8)
        for max_registers in (None, MAX_REGISTERS)
    ]
    return [config for config in tried if is_valid(config, shape)]


def plan_settings(shape: DecodeShape, config: Config, device: Device) -> PlanSettings:
    """What a plan for these launches is made for.

    The capacity is as small as good plans allow: a program without an item costs its launch.
    """
    programs_per_item = shape.num_kv_heads * -(-shape.rows // config.columns)
    num_slots = max(1, config.programs_per_sm * device.num_sms)
    wave = max(1, num_slots // max(1, programs_per_item))
    max_blocks = -(-shape.max_pages * shape.page_size // config.block_tokens)
    if shape.num_sequences == 1:
        # More splits than are combined at once pay for longer sequences only.
        is_short = max_blocks <= COMBINED_AT_ONCE * (COMBINE_BLOCKS + ITEM_BLOCKS)
        wanted = min(wave, COMBINED_AT_ONCE) if is_short else wave
    elif 8 * shape.num_sequences <= wave:  # each has many splits: one item for each slot will do
        wanted = wave + shape.num_sequences
    else:
        wanted = max(3 * wave, shape.num_sequences + 2 * wave)
    return PlanSettings(
        block_tokens=config.block_tokens,
        q_len=shape.q_len,
        window=shape.window,
        num_slots=num_slots,
        programs_per_item=programs_per_item,
        capacity=max(shape.num_sequences, min(wanted, shape.num_sequences * max_blocks)),
    )


def work(shape: DecodeShape, num_tokens: int) -> tuple[int, int]:
    """(flops, bytes) of a step over sequences of `num_tokens` tokens together."""
    flops = 4 * num_tokens * shape.num_heads * shape.q_len * shape.head_dim
    per_token = 2 * shape.num_kv_heads * shape.head_dim * shape.page_dtype.itemsize
    return flops, num_tokens * per_token


def is_fp8_native(device: Device) -> bool:
    """Whether Triton has e4m3 on this device; older ones decode bytes by bit operations."""
    return device.capability is None or device.capability >= GLUON_MIN_CAPABILITY


def scale_strides(scale: Tensor) -> tuple[int, int, int]:
    """(page, head, token) strides of a scale, 0 where all share one."""
    match scale.dim():
        case 0:
            return 0, 0, 0
        case 1:
            return 0, scale.stride(0), 0
    return scale.stride(0), scale.stride(1), scale.stride(2)


def _combine_splits(rows: int, width: int, num_warps: int) -> int:
    values = COMBINE_VALUES * 32 * num_warps
    return max(1, min(COMBINED_AT_ONCE, values // (_power_of_two(rows) * width)))


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

"""What the grouped_mm kernel can do, and how it is launched; no Triton here, and no GPU."""

from dataclasses import dataclass, replace

from octavo.kernels.device import Device
from octavo.kernels.scaled_mm.config import MIN_FP8_CAPABILITY, PROMOTED_DEPTH
from octavo.kernels.scaled_mm.config import objection as product_objection

# Up to so many rows of each expert its weight is streamed past them: to read it takes the time.
MAX_STREAM_ROWS = 64


@dataclass(frozen=True)
class GroupedShape:
    """[rows, depth], sorted by expert, by the transposes of num_experts × [columns, depth]."""

    rows: int
    columns: int
    depth: int
    num_experts: int

    @property
    def rows_per_expert(self) -> int:
        """The rows of an expert if all have as many; those that have rows have one at least."""
        return -(-self.rows // max(1, min(self.rows, self.num_experts)))


@dataclass(frozen=True)
class GroupedConfig:
    """A tile of one expert's results for each program.

    is_streamed: the weight is the operand with many rows, so that 16 rows of a fill a tile.
    is_tma: tiles of the weight are copied in bulk where its rows allow it. is_decoded_by_bits: for
    GPUs without the FP8 type.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    is_streamed: bool = False
    is_tma: bool = False
    is_decoded_by_bits: bool = False
    num_warps: int = 8
    num_stages: int = 3


def objection(device: Device, *, is_fp8: bool) -> str | None:
    """Why the kernel cannot run on this device; None if it can. is_fp8: both operands are FP8."""
    return product_objection(device, is_fp8=is_fp8, activation=None)


def max_tiles(shape: GroupedShape, block_m: int) -> int:
    """Rows of tiles that any routing needs at most, those of no expert included.

    Only the device knows how many rows an expert has: every expert may end with a tile in part.
    """
    return shape.rows // block_m + min(shape.rows, shape.num_experts + 1)


def default(shape: GroupedShape, device: Device, width: int, *, is_fp8: bool) -> GroupedConfig:
    """The launch settings by rule; width: how many columns share a scale, 0 for all."""
    block_k = _block_k(width)
    block_m = max(16, _power_of_two(shape.rows_per_expert))
    if not is_fp8:
        return GroupedConfig(
            block_m=min(128, block_m),
            block_n=64 if block_m < 64 else 128,
            block_k=min(128 if block_m < 64 else 64, block_k),
            is_streamed=True,
            is_decoded_by_bits=(device.capability or (0, 0)) < MIN_FP8_CAPABILITY,
            num_warps=4 if block_m < 128 else 8,
        )
    if shape.rows_per_expert <= MAX_STREAM_ROWS:
        return GroupedConfig(
            block_m=block_m,
            block_n=64,
            block_k=block_k,
            is_streamed=True,
            num_warps=4,
            num_stages=4,
        )
    if (device.capability or (9, 0)) >= (9, 0):
        return GroupedConfig(block_k=block_k, is_tma=True)
    # 99 KB of shared memory: two stages of 32 KB. Scales of blocks take registers: half the rows.
    return GroupedConfig(block_m=64 if width else 128, block_k=block_k, num_stages=2)


def is_valid(config: GroupedConfig, device: Device, *, is_fp8: bool) -> bool:
    """Whether a launch with these settings computes the right sums."""
    sizes = (config.block_m, config.block_n, config.block_k)
    if any(size < 16 or size & (size - 1) for size in (*sizes, 16 * config.num_warps)):
        return False
    rows = config.block_n if config.is_streamed else config.block_m
    if not is_fp8 and not config.is_streamed:
        return False
    if config.num_warps >= 8 and rows < 64:
        return False
    is_promoted = not is_fp8 or config.block_k <= PROMOTED_DEPTH
    return is_promoted and _shared_bytes(config, is_fp8) <= device.shared_bytes


def candidates(
    shape: GroupedShape, device: Device, width: int, *, is_fp8: bool
) -> list[GroupedConfig]:
    """Launch settings worth timing, the default first."""
    first = default(shape, device, width, is_fp8=is_fp8)
    others = [replace(first, num_stages=stages) for stages in (2, 3, 4, 6)]
    has_tma = (device.capability or (9, 0)) >= (9, 0)
    if first.is_streamed:
        others += [
            replace(first, block_m=block_m, block_n=block_n, num_stages=stages, is_tma=is_tma)
            for block_m in dict.fromkeys((16, 32, first.block_m))
            for block_n in (64, 128)
            for stages in (3, 4, 6)
            for is_tma in dict.fromkeys((False, has_tma and is_fp8))
        ]
    else:
        # More values of a tile for each thread than these spill registers.
        others += [
            replace(first, block_m=block_m, num_warps=num_warps, is_tma=is_tma)
            for block_m, num_warps in ((64, 4), (64, 8), (128, 8))
            for is_tma in dict.fromkeys((False, has_tma))
        ]
    unique = dict.fromkeys([first, *others])
    return [config for config in unique if is_valid(config, device, is_fp8=is_fp8)]


def work(shape: GroupedShape, num_hit: int, a_bytes: int, out_bytes: int) -> tuple[int, int]:
    """Floating-point operations and bytes moved at least.

    num_hit: experts that have rows; the weights of the others are not read. a_bytes, out_bytes: of
    one value.
    """
    flops = 2 * shape.rows * shape.columns * shape.depth
    operands = shape.rows * shape.depth * a_bytes + num_hit * shape.columns * shape.depth
    return flops, operands + shape.rows * shape.columns * out_bytes


def _shared_bytes(config: GroupedConfig, is_fp8: bool) -> int:
    """Shared memory of tiles on their way, barriers aside; a plain a has 2 bytes for a value."""
    row_bytes = config.block_n + config.block_m * (1 if is_fp8 else 2)
    return row_bytes * config.block_k * config.num_stages + 1024


def _block_k(width: int) -> int:
    """Columns of one step: at most PROMOTED_DEPTH, in which no block of scales begins."""
    if width % PROMOTED_DEPTH == 0:
        return PROMOTED_DEPTH
    return min(PROMOTED_DEPTH, max(32, _power_of_two(width)))


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

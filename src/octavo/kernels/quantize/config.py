"""What the quantize kernels can do, and how they are launched; no Triton here, and no GPU."""

from dataclasses import dataclass

from octavo.kernels import tuning
from octavo.kernels.device import Device
from octavo.numerics.granularity import Granularity, PerBlock, PerChannel, PerToken, Shape

# A block of this many values still fits into the registers of one program of 16 warps.
MAX_BLOCK = 32768
MIN_CAPABILITY = (8, 9)
# Warps for a row that is padded to so many values, and the widest that stays in registers.
WARPS_OF_ROW = {1024: 1, 2048: 1, 4096: 2, 8192: 4, 16384: 8}
MAX_ROW = 16384
# From so many values on, wide rows are read twice in chunks instead of being kept in registers.
MIN_CHUNKED = 48_000_000
# Programs of the amax pass: every program of the cast reads that many values again.
MAX_PARTIALS = 1024
# Rows in registers: so many tiles, and so many values of a thread.
MAX_CHUNKS, MAX_PER_THREAD = 12, 64


@dataclass(frozen=True)
class QuantizeConfig:
    """One program's tile of the tensor seen as [rows, columns], and its warps.

    num_chunks: of scales per token, the tiles in which a program keeps its rows in registers; with
    0 it reads them twice.
    """

    block_rows: int
    block_columns: int
    num_warps: int
    num_chunks: int = 0


def objection(device: Device, granularity: Granularity) -> str | None:
    """Why the kernels cannot quantize with this granularity on this device; None if they can."""
    if device.capability is None:
        return f"Triton needs a CUDA GPU, got {device.name}"
    if device.capability < MIN_CAPABILITY:
        major, minor = device.capability
        return f"FP8 casts need compute capability 8.9 or newer, got {major}.{minor}"
    if isinstance(granularity, PerBlock):
        block = _power_of_two(granularity.rows) * _power_of_two(granularity.columns)
        if block > MAX_BLOCK:
            return f"a block must fit {MAX_BLOCK} values, got {granularity}"
    return None


def problem(shape: Shape, granularity: Granularity) -> str | None:
    """What launch settings are tuned for: rows of tokens, by width and by how much there is."""
    if not isinstance(granularity, PerToken):
        return None
    num_rows, num_columns = shape
    return f"token columns {num_columns} values 2^{(num_rows * num_columns).bit_length()}"


def choose(shape: Shape, granularity: Granularity, device: Device) -> QuantizeConfig:
    """The launch settings: tuned ones, or those by rule."""
    name = problem(shape, granularity)
    tuned = None
    if name is not None:
        tuned = tuning.find("quantize", name, device, QuantizeConfig)
    return tuned if tuned is not None else default(shape, granularity)


def default(shape: Shape, granularity: Granularity) -> QuantizeConfig:
    """The launch settings by rule, for a tensor [rows, columns]; a group is one tile if it can."""
    num_rows, num_columns = shape
    match granularity:
        case PerBlock(rows=1, columns=width):
            columns = _power_of_two(width)
            rows = max(1, min(_power_of_two(num_rows), 4096 // columns))
        case PerBlock(rows=height, columns=width):
            rows, columns = _power_of_two(height), _power_of_two(width)
        case PerToken() | PerChannel():
            return _default_rows(num_rows, num_columns)
        case _:
            columns = min(_power_of_two(num_columns), 1024)
            rows = max(1, 4096 // columns)
    num_warps = max(1, min(16, rows * columns // 1024))
    return QuantizeConfig(rows, columns, num_warps)


def candidates(shape: Shape, granularity: Granularity) -> list[QuantizeConfig]:
    """What a tuner may try for scales per token, the default first."""
    _, num_columns = shape
    width = _power_of_two(num_columns)
    exact = num_columns & -num_columns  # the widest tile without a tail
    found = [default(shape, granularity)]
    for rows in (1, 2, 4):
        found += [QuantizeConfig(rows, width, warps, num_chunks=1) for warps in (1, 2, 4, 8)]
    for block in {max(128, exact), max(128, exact // 2), 512, 1024, 2048}:
        chunks = -(-num_columns // block)
        for warps in (1, 2, 4, 8):
            found.append(QuantizeConfig(1, block, warps))
            if chunks <= MAX_CHUNKS:
                found.append(QuantizeConfig(1, block, warps, num_chunks=chunks))

    def fits(config: QuantizeConfig) -> bool:
        values = config.block_rows * config.block_columns * max(1, config.num_chunks)
        return 4 <= values // (32 * config.num_warps) <= MAX_PER_THREAD

    unique = list(dict.fromkeys(found))
    return [one for one in unique if is_valid(one, granularity) and (one == found[0] or fits(one))]


def is_valid(config: QuantizeConfig, granularity: Granularity) -> bool:
    """Whether a launch with these settings computes the right scales."""
    tile = config.block_rows * config.block_columns
    is_power = tile & (tile - 1) == 0 and config.num_warps & (config.num_warps - 1) == 0
    if isinstance(granularity, PerBlock):
        covers = config.block_columns >= granularity.columns
        is_one_row = granularity.rows == 1
        return is_power and covers and (is_one_row or config.block_rows >= granularity.rows)
    return is_power


def _default_rows(num_rows: int, num_columns: int) -> QuantizeConfig:
    """A whole row in registers unless there is much of it; figures: results/kernels_h200.jsonl."""
    width = _power_of_two(num_columns)
    is_chunked = width > 4096 and num_rows * num_columns >= MIN_CHUNKED
    if width > MAX_ROW or is_chunked:
        return QuantizeConfig(1, 4096, 8) if num_columns > 8192 else QuantizeConfig(1, 2048, 4)
    if width >= 1024:
        return QuantizeConfig(1, width, WARPS_OF_ROW[width], num_chunks=1)
    return QuantizeConfig(max(1, 2048 // width), width, 2, num_chunks=1)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

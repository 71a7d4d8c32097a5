"""What the matvec kernel can do, and how it is launched; no Triton here, and no GPU."""

from dataclasses import dataclass

from octavo.kernels.device import Device

# Values of a row that are read at a time, the most first: what is on its way hides the latency.
BLOCKS_K = (2048, 1024, 512)
# Triton's own limit for one tile.
MAX_TILE = 2**20


@dataclass(frozen=True)
class MatvecConfig:
    """The tile of one program: rows of the weight, and values of each that are read at a time.

    is_dependent: starts while the kernel in front of it ends, and lets the next one do so.
    """

    block_n: int = 4
    block_k: int = 2048
    num_warps: int = 4
    is_dependent: bool = False


def objection(device: Device) -> str | None:
    """Why the kernel cannot run on this device; None if it can."""
    if device.capability is None:
        return f"Triton needs a CUDA GPU, got {device.name}"
    if device.capability < (8, 0):
        major, minor = device.capability
        return f"Triton kernels need compute capability 8.0 or newer, got {major}.{minor}"
    return None


def default(depth: int, device: Device) -> MatvecConfig:
    """The launch settings by rule: the tile that wastes least of a row, the larger of two alike."""
    block_k = min(BLOCKS_K, key=lambda size: -depth % size)
    return MatvecConfig(block_k=block_k, is_dependent=device.has_dependents)


def is_valid(config: MatvecConfig, device: Device) -> bool:
    """Whether a launch with these settings computes the right sums."""
    sizes = (config.block_n, config.block_k, config.num_warps)
    if any(size < 1 or size & (size - 1) for size in sizes):
        return False
    has_room = config.block_n * config.block_k <= MAX_TILE
    return has_room and (device.has_dependents or not config.is_dependent)


def candidates(depth: int, device: Device) -> list[MatvecConfig]:
    """Launch settings worth timing, the default first."""
    others = [
        MatvecConfig(block_n, block_k, num_warps, is_dependent)
        for block_n in (1, 2, 4, 8)
        for block_k in BLOCKS_K
        for num_warps in (2, 4, 8)
        for is_dependent in (True, False)
        # 32 to 128 sums for each thread: fewer leave the memory idle, more do not fit.
        if 1024 <= block_n * block_k // num_warps <= 4096
    ]
    unique = dict.fromkeys([default(depth, device), *others])
    return [config for config in unique if is_valid(config, device)]


def work(columns: int, depth: int, value_bytes: int = 2) -> tuple[int, int]:
    """(flops, bytes) of one call: the weight's bytes, beside which x and the result are nothing."""
    return 2 * columns * depth, columns * depth * value_bytes

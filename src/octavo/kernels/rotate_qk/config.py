"""What the rotate_qk kernel can do, and how it is launched; no Triton here, and no GPU."""

from dataclasses import dataclass

from octavo.kernels.device import Device

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class RotateQkConfig:
    """The tile of one program: tokens, and values of heads that lie side by side; and its warps."""

    block_tokens: int
    block_width: int
    num_warps: int


def objection(device: Device, head_dim: int | None) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if device.capability is None:
        return f"Triton needs a CUDA GPU, got {device.name}"
    if device.capability < (8, 0):
        major, minor = device.capability
        return f"Triton kernels need compute capability 8.0 or newer, got {major}.{minor}"
    if head_dim is None or head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim must be even and 2 to {MAX_HEAD_DIM}, got {head_dim}"
    return None


def default() -> RotateQkConfig:
    """The launch settings: the tile of quantize_qkv, which reads the same values the same way."""
    return RotateQkConfig(32, 128, 4)


def is_valid(config: RotateQkConfig) -> bool:
    """Whether a launch with these settings computes the right results."""
    sizes = (config.block_tokens, config.block_width, config.num_warps)
    # Pairs lie apart in tiles of half the width.
    return all(n > 0 and n & (n - 1) == 0 for n in sizes) and config.block_width >= 2


def candidates() -> list[RotateQkConfig]:
    """Launch settings worth timing."""
    return [
        RotateQkConfig(tokens, width, num_warps)
        for tokens in (16, 32, 64)
        for width, num_warps in ((128, 4), (256, 4), (256, 8))
    ]


def work(
    num_tokens: int,
    num_kv_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    input_bytes: int = 2,
) -> tuple[int, int]:
    """(flops, bytes) of one call: every value read and written once, in the same dtype."""
    values = (num_tokens * num_heads + num_kv_tokens * num_kv_heads) * head_dim
    return 3 * values, 2 * values * input_bytes

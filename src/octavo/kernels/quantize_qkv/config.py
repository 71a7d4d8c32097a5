"""What the quantize_qkv kernels can do, and how they are launched; no Triton here, and no GPU."""

from dataclasses import dataclass

from octavo.kernels.device import Device

MIN_CAPABILITY = (8, 9)
MAX_HEAD_DIM = 256
NORM_HEAD_DIMS = (32, 64, 128)
# Passes of a history: the kernel finds the current one's slot in 32 bits.
MAX_RING_LENGTH = 2**16 - 1
# Of a thread in the amax pass: six programs share an SM, so that 3 × 256 run at once.
AMAX_REGISTERS = 80
# Tokens and width of q and k, keys and values of transposed v, warps.
TILE = (32, 128, 64, 64, 4)
# Tokens and heads of q and k that have norms: on an H200 faster than (16, 8), (16, 24) and (32, 4).
NORM_TILE = (8, 12)


@dataclass(frozen=True)
class QuantizeQkvConfig:
    """Tiles of one program, its warps, and how many programs share one amax.

    block_tokens × block_width: of q and k, and of v in rows; width counts values of heads that lie
    side by side. block_keys × block_values: of transposed v. num_partials: programs of the amax
    pass for each scale, all of which every program of the cast reads again. max_registers: of a
    thread in the cast; None leaves it to the compiler.
    """

    block_tokens: int
    block_width: int
    block_keys: int
    block_values: int
    num_warps: int
    num_partials: int
    max_registers: int | None = None


def objection(device: Device, head_dim: int | None, features: frozenset[str]) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    if device.capability is None:
        return f"Triton needs a CUDA GPU, got {device.name}"
    if device.capability < MIN_CAPABILITY:
        major, minor = device.capability
        return f"FP8 casts need compute capability 8.9 or newer, got {major}.{minor}"
    if head_dim is None or not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim must be 1 to {MAX_HEAD_DIM}, got {head_dim}"
    if "norm" in features and head_dim not in NORM_HEAD_DIMS:
        expected = ", ".join(map(str, NORM_HEAD_DIMS))
        return f"norms of queries and keys need head_dim {expected}, got {head_dim}"
    if "interleaved" in features and head_dim % 2:
        return f"interleaved rotary pairs need an even head_dim, got {head_dim}"
    return None


def default(num_tokens: int, num_scales: int) -> QuantizeQkvConfig:
    """The launch settings for so many tokens and scales of the largest of q, k and v."""
    tokens, width, keys, values, num_warps = TILE
    num_tiles = max(1, -(-num_tokens // tokens))
    # One scale: 256 programs each for q, k and v. One per head: fewer for each, as many in all.
    wanted = 256 if num_scales == 1 else max(8, 512 // num_scales)
    num_partials = min(_power_of_two(wanted), _power_of_two(4 * num_tiles))
    return QuantizeQkvConfig(tokens, width, keys, values, num_warps, num_partials)


def token_classes(num_scales: int) -> list[int]:
    """A number of tokens for each of the launch settings that `default` has."""
    found = [TILE[0]]
    while default(2 * found[-1], num_scales) != default(found[-1], num_scales):
        found.append(2 * found[-1])
    return found


def is_valid(config: QuantizeQkvConfig) -> bool:
    """Whether a launch with these settings computes the right results."""
    sizes = (
        config.block_tokens,
        config.block_width,
        config.block_keys,
        config.block_values,
        config.num_warps,
        config.num_partials,
    )
    return all(n > 0 and n & (n - 1) == 0 for n in sizes) and config.block_keys >= 16


def candidates() -> list[QuantizeQkvConfig]:
    """Launch settings worth timing."""
    return [
        QuantizeQkvConfig(tokens, width, keys, values, num_warps, 256)
        for tokens, width, num_warps in ((32, 128, 8), (32, 128, 4), (16, 128, 4), (64, 128, 8))
        for keys, values in ((64, 64), (128, 64), (128, 32))
    ]


def work(
    num_tokens: int,
    num_kv_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    input_bytes: int = 2,
) -> tuple[int, int]:
    """(flops, bytes) of one call with static scales: every value read and written once."""
    values = (num_tokens * num_heads + 2 * num_kv_tokens * num_kv_heads) * head_dim
    return values, values * (input_bytes + 1)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

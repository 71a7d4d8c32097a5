"""What the append_kv kernel can do, and how it is launched; no Triton here, and no GPU."""

from dataclasses import dataclass

import torch

from octavo.kernels import tuning
from octavo.kernels.device import Device
from octavo.numerics.formats import is_fp8

MIN_FP8_CAPABILITY = (8, 9)
MIN_CAPABILITY = (8, 0)
# A kernel may start before the one in front of it has ended.
MIN_DEPENDENT_LAUNCH = (9, 0)
MAX_HEAD_DIM = 256
# Query heads of one program, padded to a power of two, times head_dim: what registers hold.
MAX_QUERY_VALUES = 32768


MAX_BLOCK_HEADS = 4


@dataclass(frozen=True)
class AppendConfig:
    """One program has block_heads KV heads of a token and their queries.

    is_dependent: it may start while the kernel before it ends, and wait for its results there.
    """

    block_heads: int
    num_warps: int
    is_dependent: bool


def objection(
    device: Device,
    head_dim: int | None,
    page_dtype: torch.dtype | None,
    group: int = 1,
    *,
    is_fp8_query: bool = False,
) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if device.capability is None:
        return f"Triton needs a CUDA GPU, got {device.name}"
    major, minor = device.capability
    if device.capability < MIN_CAPABILITY:
        return f"bfloat16 needs compute capability 8.0 or newer, got {major}.{minor}"
    has_fp8 = is_fp8_query or (page_dtype is not None and is_fp8(page_dtype))
    if has_fp8 and device.capability < MIN_FP8_CAPABILITY:
        return f"FP8 casts need compute capability 8.9 or newer, got {major}.{minor}"
    if head_dim is None or not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim must be 1 to {MAX_HEAD_DIM}, got {head_dim}"
    if query_values(group, head_dim) > MAX_QUERY_VALUES:
        return (
            f"the queries of a KV head must fit {MAX_QUERY_VALUES} values, got {group} heads of "
            f"{head_dim}"
        )
    return None


def query_values(group: int, head_dim: int) -> int:
    """Values in one program's tile of queries."""
    return _power_of_two(group) * _power_of_two(head_dim)


def problem(num_tokens: int, num_kv_heads: int, group: int, head_dim: int) -> str:
    """What launch settings are tuned for."""
    tokens = f"tokens 2^{(num_tokens - 1).bit_length()}"
    return f"{tokens} KV heads {num_kv_heads} group {group} head_dim {head_dim}"


def choose(
    device: Device, num_tokens: int, num_kv_heads: int, group: int, head_dim: int
) -> AppendConfig:
    """The launch settings: tuned ones, or those by rule."""
    name = problem(num_tokens, num_kv_heads, group, head_dim)
    tuned = tuning.find("append_kv", name, device, AppendConfig)
    return tuned if tuned is not None else default(device, num_kv_heads, group, head_dim)


def default(device: Device, num_kv_heads: int, group: int, head_dim: int) -> AppendConfig:
    """A warp for each KV head: a token waits for memory and for its launch, not for arithmetic."""
    block_heads = min(MAX_BLOCK_HEADS, _power_of_two(num_kv_heads))
    while block_heads > 1 and query_values(block_heads * group, head_dim) > MAX_QUERY_VALUES:
        block_heads //= 2
    num_warps = max(1, min(16, query_values(block_heads * group, head_dim) // 512))
    is_dependent = device.capability is not None and device.capability >= MIN_DEPENDENT_LAUNCH
    return AppendConfig(block_heads, num_warps, is_dependent)


def is_valid(config: AppendConfig, device: Device) -> bool:
    """Whether a launch with these settings can run on this device."""
    sizes = (config.block_heads, config.num_warps)
    can_depend = device.capability is not None and device.capability >= MIN_DEPENDENT_LAUNCH
    is_power = all(n > 0 and n & (n - 1) == 0 for n in sizes)
    return is_power and (can_depend or not config.is_dependent)


def candidates(device: Device) -> list[AppendConfig]:
    """Launch settings worth timing."""
    found = [
        AppendConfig(block_heads, num_warps, is_dependent)
        for block_heads in (1, 2, 4, 8)
        for num_warps in (1, 2, 4, 8)
        for is_dependent in (False, True)
    ]
    return [config for config in found if is_valid(config, device)]


def work(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    input_bytes: int = 2,
    page_bytes: int = 1,
) -> tuple[int, int]:
    """(flops, bytes) of one call with queries: each value read once and written once."""
    queries = num_tokens * num_heads * head_dim
    pairs = 2 * num_tokens * num_kv_heads * head_dim
    num_bytes = 2 * queries * input_bytes + pairs * (input_bytes + page_bytes)
    return 3 * (queries + pairs // 2), num_bytes


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

"""What the attention kernel can do, and how it is launched; no Triton here, and no GPU."""

from dataclasses import dataclass

import torch

from octavo.kernels import tuning
from octavo.kernels.device import Device
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import is_fp8

MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 256
# Queries of one program's tile: calls with fewer have one tile for each head.
SHORT = 64
# Bytes of shared memory beside the tiles; as compiled for sm_90, with room to spare.
SHARED_EXTRA = 1024


@dataclass(frozen=True)
class AttentionShape:
    """What decides the launch settings."""

    dtype: torch.dtype
    head_dim: int
    max_q_len: int
    promote_every: int | None = 1
    has_token_scales: bool = False  # one for each key, read beside it


@dataclass(frozen=True)
class AttentionConfig:
    """One program's tile: block_m queries, which see block_n keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class GluonConfig:
    """Launch settings of the kernel for Hopper: 128 queries a program, block_n keys at a time.

    has_ones: the tensor core adds up the rows of P, too. has_one_loop: tiles that hide keys are not
    apart, which saves registers. is_persistent: a program for each SM does one tile of queries
    after the other.
    """

    block_n: int = 128
    num_stages: int = 4
    has_ones: bool = False
    has_one_loop: bool = False
    is_persistent: bool = False


def default_gluon(head_dim: int, spec: AttentionSpec) -> GluonConfig:
    """The launch settings by rule: what each head_dim has registers for.

    Where jobs differ in length the hardware deals them out better than a program for each SM does,
    and what hides keys takes the registers that a loop over jobs needs.
    """
    if head_dim <= 80:
        is_plain = not spec.causal and spec.window is None and spec.softcap is None
        return GluonConfig(has_ones=True, is_persistent=is_plain)
    if head_dim < 128:
        return GluonConfig(has_ones=True, has_one_loop=True)
    return GluonConfig(block_n=128 if head_dim == 128 else 64)


def is_valid_gluon(config: GluonConfig) -> bool:
    """Whether a launch of Hopper's kernel with these settings is possible, and right."""
    sizes = (config.block_n, config.num_stages)
    return all(size >= 2 and size & (size - 1) == 0 for size in sizes)


def hopper_objection(
    device: Device,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    head_dim: int | None,
    granularity: str,
    features: frozenset[str],
) -> str | None:
    """Why the kernel for Hopper cannot serve a request; None if it can."""
    if device.capability is None:
        return f"Gluon needs a CUDA GPU, got {device.name}"
    if device.capability != (9, 0):
        major, minor = device.capability
        return f"it is made for compute capability 9.0, got {major}.{minor}"
    if any(dtype != torch.float8_e4m3fn for dtype in dtypes):
        return f"it takes e4m3, got {dtypes[0]} and {dtypes[1]}"
    if head_dim is not None and not 64 <= head_dim <= 192:
        return f"head_dim must lie in 64 … 192, got {head_dim}"
    if granularity == "token":
        return "scales per token and head are Triton's"
    refused = {
        "key_mask": "a key mask is Triton's",
        "mixed": "keys and values must have one dtype",
        "one-level": "it always accumulates in two levels",
        "promote-later": "it promotes after every tile",
    }
    if found := sorted(features & refused.keys()):
        return refused[found[0]]
    if "transposed" not in features:
        return "values must lie transposed: quantize_qkv(value_layout='transposed')"
    return None


def objection(device: Device, dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Why the kernel cannot run for operands of this dtype on this device; None if it can."""
    if device.capability is None:
        return f"Triton needs a CUDA GPU, got {device.name}"
    major, minor = device.capability
    if device.capability < (8, 0):
        return f"Triton kernels need compute capability 8.0 or newer, got {major}.{minor}"
    if is_fp8(dtype) and device.capability < (8, 9):
        return (
            "FP8 tensor cores need compute capability 8.9 or newer, got "
            f"{major}.{minor}: run attention in bfloat16 there"
        )
    if head_dim is not None and not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim must lie in {MIN_HEAD_DIM} … {MAX_HEAD_DIM}, got {head_dim}"
    return None


def split_head_dim(head_dim: int, is_fp8_operand: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """(main, rest) of q·kᵀ and of P·V: head_dim as tiles that are powers of two; no rest is 0.

    72 is 64 + 32 (FP8 sums at least 32 products) and 64 + 16 instead of 128 twice.
    256 is 128 + 128: one tile's sums of all 256 do not fit the registers beside the running ones.
    """
    main = min(128, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - main
    if rest == 0:
        return (main, 0), (main, 0)
    aligned = 1 << (rest - 1).bit_length()
    return (main, max(aligned, 32 if is_fp8_operand else 16)), (main, max(aligned, 16))


def problem(shape: AttentionShape) -> str:
    """What launch settings are tuned for."""
    match shape.promote_every:
        case 1:
            levels = "two levels"
        case None:
            levels = "one level"
        case _:
            levels = "late promotion"
    length = "short" if shape.max_q_len <= SHORT else "long"
    return f"{str(shape.dtype).removeprefix('torch.')} head_dim {shape.head_dim} {levels} {length}"


def choose(shape: AttentionShape, device: Device) -> AttentionConfig:
    """The launch settings: tuned ones, or those by rule."""
    tuned = tuning.find("attention", problem(shape), device, AttentionConfig)
    if tuned is not None and is_valid(tuned, shape, device):
        return tuned
    return default(shape, device)


def default(shape: AttentionShape, device: Device) -> AttentionConfig:
    """The launch settings by rule: the first of a ladder that fits the device.

    FP8 takes 64 queries a program, so that two share an SM and one's exponentials run beside the
    other's products.
    """
    if is_fp8(shape.dtype):
        ladder = [AttentionConfig(64, 128, 4, 3), AttentionConfig(64, 64, 4, 3)]
        # Promotion after several tiles needs registers for what the tensor core still holds.
        if shape.head_dim > 128 or (shape.promote_every or 1) > 1:
            ladder = ladder[1:]
    elif shape.dtype == torch.float32:
        ladder = [AttentionConfig(32, 32, 4, 1)]
    else:
        ladder = [AttentionConfig(64, 64, 4, 3)]
        if shape.head_dim > 64 and shape.max_q_len > SHORT:
            ladder = [AttentionConfig(128, 128, 8, 3), AttentionConfig(128, 64, 8, 3), *ladder]
    ladder += [AttentionConfig(64, 64, 4, 2), AttentionConfig(64, 32, 4, 2)]
    return next(config for config in ladder if is_valid(config, shape, device))


def candidates(shape: AttentionShape, device: Device) -> list[AttentionConfig]:
    """What a tuner may try."""
    tried = [
        AttentionConfig(block_m, block_n, num_warps, num_stages)
        for block_m, num_warps in ((64, 4), (128, 8))
        for block_n in (64, 128)
        for num_stages in (2, 3, 4)
    ]
    return [config for config in tried if is_valid(config, shape, device)]


def is_valid(config: AttentionConfig, shape: AttentionShape, device: Device) -> bool:
    """Whether the tiles fit the shared memory and registers of the device."""
    sizes = (config.block_m, config.block_n, config.num_warps)
    if any(size & (size - 1) for size in sizes) or min(config.block_m, config.block_n) < 16:
        return False
    is_two_level = is_fp8(shape.dtype)
    sums = config.block_m * (config.block_n + (2 if is_two_level else 1) * shape.head_dim)
    registers = 32 * config.num_warps * 320  # of 255: not all live at once
    return shared_bytes(config, shape) <= device.shared_bytes and sums <= registers


def shared_bytes(config: AttentionConfig, shape: AttentionShape) -> int:
    """Shared memory of a program: its queries, num_stages tiles of keys and values, and a little.

    The little: where rows are summed up, and barriers.
    """
    (main_qk, rest_qk), (main_pv, rest_pv) = split_head_dim(shape.head_dim, is_fp8(shape.dtype))
    query, key, value = main_qk + rest_qk, main_qk + rest_qk, main_pv + rest_pv
    tiles = config.num_stages * config.block_n * (key + value)
    scales = 2 * 4 * config.num_stages * config.block_n if shape.has_token_scales else 0
    return shape.dtype.itemsize * (config.block_m * query + tiles) + scales + SHARED_EXTRA


def work(
    batch: int, q_len: int, kv_len: int, num_heads: int, head_dim: int, is_causal: bool
) -> float:
    """Floating-point operations of one call, at the real head_dim and of visible keys only."""
    pairs = q_len * kv_len
    if is_causal:
        pairs = q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2
    return 4.0 * batch * num_heads * head_dim * pairs

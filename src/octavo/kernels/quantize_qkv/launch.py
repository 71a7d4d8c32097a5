"""What the quantize_qkv kernels are launched with: operands, strides, tables and grid."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from octavo.kernels.quantize_qkv.config import AMAX_REGISTERS, NORM_TILE, QuantizeQkvConfig
from octavo.kernels.quantize_qkv.primitives import HALVES, INTERLEAVED, NONE
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import padded_head_dim
from octavo.numerics.rotary import Rotary
from octavo.numerics.value_layout import KEY_GROUP

# More than models have layers of different sizes; prompts of any length are forgotten in time.
NUM_REMEMBERED = 1024

Three = tuple[Tensor, Tensor, Tensor]


def by_part(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {f"{part}_{name}": value for part, value in zip("qkv", values, strict=True)}


class Form(NamedTuple):
    """Shapes and strides of a part: all that a launch depends on beside its pointers.

    shape: batch, tokens of x, heads and head_dim. num_first: tokens of a sequence that lie
    elsewhere.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    num_first: int = 0
    first_strides: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        """Of a sequence."""
        return self.shape[1] + self.num_first

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return self.shape[0] * self.length

    @property
    def num_heads(self) -> int:
        """How many there are."""
        return self.shape[2]


Forms = tuple[Form, Form, Form]


class Part(NamedTuple):
    """q, k or v as [batch, length, heads, head_dim], the last dimension contiguous.

    first: the tokens that stand in front of x in each sequence, if they lie elsewhere.
    """

    x: Tensor
    first: Tensor | None
    form: Form


def as_parts(qkv: Three, first: Three | None) -> list[Part]:
    """q, k and v; a stream without tokens is none."""
    if first is not None and qkv[0].shape[1] == 0:
        qkv, first = first, None
    if first is None or first[0].shape[1] == 0:
        return [_as_part(x, None) for x in qkv]
    return [_as_part(x, y) for x, y in zip(qkv, first, strict=True)]


def _as_part(x: Tensor, first: Tensor | None) -> Part:
    x = as_dense(x)
    if first is None:
        return Part(x, None, Form(x.shape, x.stride()))
    first = as_dense(first)
    return Part(x, first, Form(x.shape, x.stride(), first.shape[1], first.stride()))


def as_dense(x: Tensor) -> Tensor:
    """x as [batch, length, heads, head_dim], its last dimension contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


class Problem(NamedTuple):
    """All that launches depend on beside their tensors.

    norm: how many there are, eps, and the tokens of the first. tables: rows, strides of cos and of
    sin, rotary_dim, and whether they are interleaved.
    """

    forms: Forms
    norm: tuple[int, float, int] | None
    tables: tuple[Any, ...] | None
    per_head: bool
    config: QuantizeQkvConfig


def problem_of(
    parts: list[Part],
    norm: QkNorm | None,
    rotary: Rotary | None,
    per_head: bool,
    config: QuantizeQkvConfig,
) -> Problem:
    """What these parts, norms and tables ask for."""
    q, k, v = parts
    norms: tuple[int, float, int] | None = None
    tables: tuple[Any, ...] | None = None
    if norm is not None:
        norms = (norm.q.shape[0], norm.eps, norm.num_first)
    if rotary is not None:
        strides = (rotary.cos.stride(), rotary.sin.stride())
        tables = (rotary.cos.shape[0], *strides, rotary.rotary_dim, rotary.is_interleaved)
    return Problem((q.form, k.form, v.form), norms, tables, per_head, config)


def tensors_of(
    parts: list[Part], norm: QkNorm | None, rotary: Rotary | None
) -> dict[str, Tensor | None]:
    """The tensors that both kernels read.

    What there is none of is None, which is compiled in, or one that is not read.
    """
    q, k, v = parts
    norms = (q.x, q.x) if norm is None else (norm.q.contiguous(), norm.k.contiguous())
    tables = (q.x, q.x) if rotary is None else (rotary.cos, rotary.sin)
    return {
        **by_part("ptr", (q.x, k.x, v.x)),
        **by_part("first_ptr", (q.first, k.first, v.first)),
        "q_norm_ptr": norms[0],
        "k_norm_ptr": norms[1],
        "cos_ptr": tables[0],
        "sin_ptr": tables[1],
    }


@lru_cache(maxsize=NUM_REMEMBERED)
def amax_arguments(
    problem: Problem, ring_lengths: Sequence[int] | None, has_padding: bool
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of the amax kernel, and what it takes beside tensors."""
    num_partials = problem.config.num_partials
    arguments = {
        **_sizes(problem),
        **by_part("ring_length", ring_lengths or (1, 1, 1)),
        "HAS_PADDING": has_padding,
        "HAS_RINGS": ring_lengths is not None,
        "NUM_PARTIALS": num_partials,
        "maxnreg": AMAX_REGISTERS,
    }
    return (num_partials, num_scales(problem)), arguments


def num_scales(problem: Problem) -> int:
    """Of q, k and v together."""
    return sum(max(1, x.num_heads) if problem.per_head else 1 for x in problem.forms)


@lru_cache(maxsize=NUM_REMEMBERED)
def cast_arguments(
    problem: Problem,
    factor: float,
    scale_strides: Sequence[int],
    ring_lengths: Sequence[int] | None,
    num_columns: int | None,
    num_sequences: int | None,
    is_dynamic: bool,
    has_fma: bool,
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid of the cast kernel, and what it takes beside tensors.

    num_columns: of transposed values. num_sequences: of packed ones.
    """
    config, lengths = problem.config, ring_lengths or (1, 1, 1)
    programs = num_programs(problem, num_columns)
    has_groups = num_columns is not None and problem.forms[2].shape[0] > 0
    arguments = {
        **_sizes(problem),
        **by_part("scale_stride", scale_strides),
        **by_part("ring_length", lengths),
        "factor": factor,
        "num_sequences": num_sequences or 0,
        "num_groups": (num_columns or 0) // KEY_GROUP if has_groups else 0,
        "num_q_programs": programs[0],
        "num_k_programs": programs[1],
        "IS_TRANSPOSED": num_columns is not None,
        "IS_PACKED": num_sequences is not None,
        "BLOCK_KEYS": config.block_keys,
        "BLOCK_VALUES": config.block_values,
        "IS_DYNAMIC": is_dynamic,
        "HAS_RINGS": ring_lengths is not None,
        "NUM_PARTIALS": config.num_partials if is_dynamic else 1,
        "RING_BLOCK": 1 << (max(lengths) - 1).bit_length(),
        "HAS_FMA": has_fma,
        "maxnreg": config.max_registers,
    }
    return (sum(programs),), arguments


def _sizes(problem: Problem) -> dict[str, Any]:
    """What both kernels take: strides, norms, rotary tables and tile."""
    forms, norm, tables, per_head, config = problem
    q, k, _ = forms
    strides, align = _aligned_strides(forms)
    num_norms, eps, num_first = norm or (0, 0.0, 0)
    num_rows, cos, sin, rotary_dim, is_interleaved = tables or (1, (0, 0), (0, 0), 0, False)
    table_align = _alignment([cos[0], sin[0]])
    turning = INTERLEAVED if is_interleaved else HALVES
    return {
        **strides,
        "eps": eps,
        "NUM_NORMS": num_norms,
        "NORM_TOKENS": NORM_TILE[0],
        "NORM_HEADS": NORM_TILE[1],
        "num_first": q.num_first or num_first,
        "num_rows": max(1, num_rows),
        "cos_row": cos[0] // table_align,
        "cos_column": cos[1],
        "sin_row": sin[0] // table_align,
        "sin_column": sin[1],
        "num_q_tokens": q.num_tokens if q.num_heads else 0,
        "num_k_tokens": k.num_tokens,
        "NUM_HEADS": max(1, q.num_heads),
        "NUM_KV_HEADS": k.num_heads,
        "q_length": max(1, q.length),
        "k_length": max(1, k.length),
        "ROTARY": (NONE if tables is None else turning).value,
        "ROTARY_DIM": rotary_dim,
        "HEAD_DIM": q.shape[3],
        "PADDED": padded_head_dim(q.shape[3]),
        "ALIGN": align,
        "TABLE_ALIGN": table_align,
        "HAS_BATCH": any(_needs_batch(form) for form in forms),
        "HAS_REPEATS": tables is not None and num_rows < max(form.num_tokens for form in forms),
        "PER_HEAD": per_head,
        "BLOCK_TOKENS": config.block_tokens,
        "BLOCK_WIDTH": config.block_width,
        "num_warps": config.num_warps,
        # Products of rotary embedding are rounded one by one, as everywhere else.
        "enable_fp_fusion": False,
    }


def _aligned_strides(forms: Forms) -> tuple[dict[str, int | None], int]:
    """Strides by name, and what all of them are multiples of and are divided by."""
    streams: dict[str, list[int] | None] = {}
    for name, form in zip("qkv", forms, strict=True):
        streams[name], streams[f"{name}_first"] = _outer_strides(form), None
        if form.first_strides is not None:
            batch_size, _, *heads = form.shape
            first = Form((batch_size, form.num_first, *heads), form.first_strides)
            streams[f"{name}_first"] = _outer_strides(first)
    align = _alignment([x for strides in streams.values() for x in strides or ()])
    named: dict[str, int | None] = {}
    for name, strides in streams.items():
        for i, dimension in enumerate(("batch", "token", "head")):
            named[f"{name}_{dimension}_stride"] = strides[i] // align if strides else None
    return named, align


def _outer_strides(form: Form) -> list[int]:
    """Strides of batch, token and head; those of single ones do not matter and are 0."""
    return [form.strides[i] if form.shape[i] > 1 else 0 for i in range(3)]


def _needs_batch(form: Form) -> bool:
    """Whether tokens of all sequences do not lie at one stride."""
    batch, token, _ = _outer_strides(form)
    return form.shape[0] > 1 and (form.num_first > 0 or batch != form.length * token)


def _alignment(strides: list[int]) -> int:
    """The largest power of two up to 8 that divides all strides: values of a wide load."""
    return math.gcd(8, *strides)


def num_programs(problem: Problem, num_columns: int | None) -> list[int]:
    """Tiles of q, of k and of v; at least one for each scale, which writes it.

    num_columns: of transposed values; None if they lie in rows.
    """
    forms, norm, _, per_head, config = problem

    def blocks(num_heads: int, width: int, block: int) -> int:
        heads = max(1, num_heads)
        return heads * _ceil_div(width, block) if per_head else _ceil_div(heads * width, block)

    found = []
    for form in forms:
        rows = max(1, _ceil_div(form.num_tokens, config.block_tokens))
        width = padded_head_dim(form.shape[3])
        found.append(rows * blocks(form.num_heads, width, config.block_width))
    if norm is not None:
        tokens, heads = NORM_TILE
        for i, form in enumerate(forms[:2]):
            rows = max(1, _ceil_div(form.num_tokens, tokens))
            found[i] = rows * _ceil_div(max(1, form.num_heads), heads)
    if num_columns is not None:
        batch_size, _, num_heads, head_dim = forms[2].shape
        rows = max(1, batch_size * _ceil_div(num_columns, config.block_keys))
        found[2] = rows * blocks(num_heads, head_dim, config.block_values)
    return found


def _ceil_div(n: int, block: int) -> int:
    return -(-n // block)

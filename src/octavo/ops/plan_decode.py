"""plan_decode: the work list of one decode step, made once and shared by its layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.kernels.decode.config import (
    MAX_SEQUENCES,
    DecodeShape,
    default,
    default_gluon,
    plan_settings,
)
from octavo.kernels.device import describe
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.decode_plan import DecodePlan, PlanSettings, make_items
from octavo.ops.arguments import Arguments
from octavo.ops.check import check_heads
from octavo.ops.register import Operator
from octavo.ops.select import PREPARED, Request, features_of, remember, select

MAX_QUERY_TOKENS = 4
# Implementations that read a plan; others may take one, and need not look at it.
PLANNED = ("gluon", "triton")


def plan_decode(
    view: PagedView,
    spec: AttentionSpec = AttentionSpec(causal=True),
    *,
    num_heads: int,
    q_len: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> DecodePlan:
    """Share a batch's tokens among the programs of `decode_attention`, so that they end together.

    The plan serves every layer with this view's lengths and shapes, this window and queries
    [num_sequences, q_len, num_heads, head_dim] of this dtype. It is made on the view's device
    without waiting for it: in a CUDA graph it follows the lengths of each replay.
    """
    pages, table = view.key_pages, view.page_table
    sizes = pages.shape, table.shape, view.key_scale.dim(), num_heads, q_len
    signature = "plan settings", sizes, pages.dtype, pages.device, dtype, spec, impl
    # A compiler looks at everything once anyway.
    known = None if torch.compiler.is_compiling() else PREPARED.get(signature)
    if known is None:
        known = _choose(view, spec, num_heads, q_len, dtype, impl)
        if not torch.compiler.is_compiling():
            remember(signature, known)
    selected, settings = known
    max_tokens = view.max_pages * view.page_size
    items, counters = _OPERATOR(PlanArguments(view.lengths, settings, max_tokens, selected))
    return DecodePlan(items, counters, settings, selected)


def _choose(
    view: PagedView,
    spec: AttentionSpec,
    num_heads: int,
    q_len: int,
    dtype: torch.dtype,
    impl: str | None,
) -> tuple[str, PlanSettings]:
    """The implementation that runs a decode step, and what its plan is made for."""
    check_heads(num_heads, view.num_kv_heads)
    if not 1 <= q_len <= MAX_QUERY_TOKENS:
        raise ConfigError(f"expected 1 to {MAX_QUERY_TOKENS} query tokens, got {q_len}")
    request = decode_request(view, spec, num_heads=num_heads, dtype=dtype)
    selected = select(request, impl).impl
    return selected, settings_for(
        selected, view, spec, num_heads=num_heads, q_len=q_len, dtype=dtype
    )


def decode_request(
    view: PagedView,
    spec: AttentionSpec,
    *,
    num_heads: int,
    dtype: torch.dtype,
    has_sinks: bool = False,
) -> Request:
    """What selects the implementation of a decode step."""
    return Request(
        op="decode_attention",
        device=describe(view.device),
        dtype=dtype,
        other_dtype=view.dtype,
        head_dim=view.head_dim,
        group=num_heads // view.num_kv_heads,
        page_size=view.page_size,
        granularity=str(view.scale_granularity),
        features=features_of(spec, sinks=has_sinks),
    )


def shape_of(
    view: PagedView, spec: AttentionSpec, *, num_heads: int, q_len: int, dtype: torch.dtype
) -> DecodeShape:
    """The sizes of a decode step over this view."""
    return DecodeShape(
        num_sequences=view.num_sequences,
        q_len=q_len,
        num_heads=num_heads,
        num_kv_heads=view.num_kv_heads,
        head_dim=view.head_dim,
        page_size=view.page_size,
        max_pages=view.max_pages,
        q_dtype=dtype,
        page_dtype=view.dtype,
        has_token_scales=view.key_scale.dim() == 3,
        window=spec.window,
    )


def settings_for(
    impl: str,
    view: PagedView,
    spec: AttentionSpec,
    *,
    num_heads: int,
    q_len: int,
    dtype: torch.dtype,
) -> PlanSettings:
    """What this implementation's plan for a decode step is made for."""
    if impl in PLANNED and view.num_sequences > MAX_SEQUENCES:
        raise ConfigError(
            f"expected at most {MAX_SEQUENCES} sequences, got {view.num_sequences}: decode them in "
            "several calls"
        )
    shape = shape_of(view, spec, num_heads=num_heads, q_len=q_len, dtype=dtype)
    device = describe(view.device)
    config = (default_gluon if impl == "gluon" else default)(shape, device)
    return plan_settings(shape, config, device)


@dataclass(eq=False)
class PlanArguments(Arguments):
    """What a plan is made of, for this implementation of `decode_attention`."""

    lengths: Tensor
    settings: PlanSettings
    max_tokens: int
    impl: str

    def check(self) -> None:
        """Nothing is left to check."""

    def prepare(self) -> Callable[..., Any]:
        if self.impl not in PLANNED:
            return _plan_by_torch
        from octavo.kernels.decode.triton import make_plan

        return make_plan

    def is_repeatable(self) -> bool:
        return self.impl in PLANNED

    def run(self, run: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        max_blocks = -(-self.max_tokens // self.settings.block_tokens)
        items, counters = run(self.lengths, self.settings, max_blocks)
        return items, counters


def _plan_by_torch(
    lengths: Tensor, settings: PlanSettings, max_blocks: int
) -> tuple[Tensor, Tensor]:
    num_counters = len(lengths) * settings.programs_per_item
    counters = torch.zeros(num_counters, dtype=torch.int32, device=lengths.device)
    return make_items(lengths, settings).to(lengths.device), counters


def _fake(lengths: Tensor, settings: list[int]) -> tuple[Tensor, Tensor]:
    made_for = PlanSettings.of_numbers(settings)
    items = lengths.new_empty((made_for.capacity, 6))
    return items, lengths.new_empty(lengths.shape[0] * made_for.programs_per_item)


_OPERATOR = Operator("plan_decode", PlanArguments, _fake, constants=("max_tokens",))

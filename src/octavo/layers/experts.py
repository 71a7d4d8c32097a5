"""Mixtures of experts with FP8 weights: each token by the experts that a router chose for it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import CheckpointError, ConfigError
from octavo.internals import require
from octavo.layers.linear import WITHOUT_FP8, check_weight
from octavo.numerics.buffers import Float32Buffers
from octavo.numerics.formats import format_named
from octavo.numerics.granularity import PerBlock, PerChannel, PerTensor, parse_granularity
from octavo.numerics.quantize import Quantized
from octavo.numerics.scales import amax_to_scale, finite_amax
from octavo.ops.check import check_fp8_device, check_one_device
from octavo.recipe import LinearSettings

require("torch.nn.Module._buffers", "torch.nn.Module._load_from_state_dict")


class Routing(NamedTuple):
    """Which rows each expert has: a row is a token at one of its experts, sorted by expert.

    ends: int32 [experts], where the rows of each end. tokens: [rows], which token each row is.
    places: [tokens, top k], the row of a token at each of its experts.
    """

    ends: Tensor
    tokens: Tensor
    places: Tensor


def route(index: Tensor, num_experts: int) -> Routing:
    """The routing for index [tokens, top k], the experts of each token; nothing waits for it.

    Numbers that are no expert's, from num_experts on, have rows behind those of all experts.
    """
    experts, order = index.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, dtype=experts.dtype, device=index.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    rows = torch.arange(len(order), device=index.device)
    places = torch.empty_like(order).scatter_(0, order, rows)
    tokens = order // index.shape[1] if index.shape[1] else order
    return Routing(ends, tokens, places.view(index.shape))


class Fp8ExpertLinear(Float32Buffers):
    """One linear layer of every expert: rows by the weight of their expert, which is in e4m3.

    weight: float8 buffer [experts, out, in]; weight_scale: float32, [experts, out], or
    [experts, ⌈out/128⌉, ⌈in/128⌉] per block. Per tensor, an expert's outputs share a scale, which
    is kept for each of them. input_scale: float32 [], of static scaling alone: for all experts.
    The buffers keep their bits when the model changes its dtype. name: what errors call the layer.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(
        self,
        shape: tuple[int, int, int],
        settings: LinearSettings,
        *,
        device: torch.device | str | None = None,
        name: str = "",
        impl: str | None = None,
    ) -> None:
        super().__init__()
        if min(shape) < 1:
            raise ConfigError(f"experts {name}: expected sizes from 1 on, got {list(shape)}")
        self.num_experts, self.out_features, self.in_features = shape
        self.settings, self.name, self.impl = settings, name, impl
        granularity = parse_granularity(settings.weight)
        self.granularity = granularity if isinstance(granularity, PerBlock) else PerChannel()
        self.activation = parse_granularity(settings.activation) if settings.activation else None
        fp8 = format_named(settings.format).dtype
        scale_shape = self.granularity.scale_shape(shape)
        scale = torch.full(scale_shape, torch.nan, dtype=torch.float32, device=device)
        self.register_buffer("weight", torch.zeros(shape, dtype=fp8, device=device))
        self.register_buffer("weight_scale", scale)
        is_static = settings.scaling == "static"
        self.register_buffer("input_scale", scale.new_full((), torch.nan) if is_static else None)

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        settings: LinearSettings,
        *,
        is_transposed: bool = False,
        parts: tuple[slice, ...] = (slice(None),),
        name: str = "",
        impl: str | None = None,
    ) -> Self:
        """The FP8 layer for a plain weight [experts, out, in], or [experts, in, out].

        parts: outputs that were layers of their own; per tensor, each has a scale. Experts are
        quantized one after the other: beside the weights there is no more than one of them.
        """
        weight = weight.detach()
        check_weight(weight, f"experts {name}")
        if is_transposed:
            weight = weight.transpose(1, 2)
        num_experts, num_outputs, depth = weight.shape
        made = cls(
            (num_experts, num_outputs, depth), settings, device=weight.device, name=name, impl=impl
        )
        fmt = format_named(settings.format)
        for expert, plain in enumerate(weight):
            scale = None
            if settings.weight == "tensor":
                scale = plain.new_empty(num_outputs, dtype=torch.float32)
                for part in parts:
                    scale[part] = amax_to_scale(finite_amax(plain[part], PerTensor()), fmt)
            quantized = ops.quantize(plain.contiguous(), made.granularity, fmt, scale=scale)
            made.weight[expert], made.weight_scale[expert] = quantized.data, quantized.scale
        return made

    def take_(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors of a state dict, without a copy; CheckpointError for one that cannot be."""
        for name, x in tensors.items():
            if problem := self._objection(name, x):
                raise CheckpointError(f"experts {self.name}: {name}: {problem}")
            setattr(self, name, x)

    def quantize(self, x: Tensor) -> Quantized | Tensor:
        """Tokens as the product takes them: in FP8, unless only the weight is quantized."""
        if self.activation is None:
            return x
        check_fp8_device(f"experts {self.name}", x.device, self.impl, instead=WITHOUT_FP8)
        granularity = self.activation if self.input_scale is None else PerTensor()
        return ops.quantize(x, granularity, scale=self.input_scale)

    def forward(
        self, input: Tensor, routing: Routing, bias: Tensor | None = None, *, is_sorted: bool
    ) -> Tensor:
        """Rows [rows, out] in the input's dtype; bias: [experts, out].

        input: [tokens, in], or, if it is_sorted, the rows that another layer of the experts gave.
        """
        if input.dim() != 2 or input.shape[1] != self.in_features:
            raise ConfigError(
                f"experts {self.name}: expected x [..., {self.in_features}], got "
                f"{list(input.shape)}"
            )
        return ops.grouped_mm(
            self.quantize(input),
            Quantized(self.weight, self.weight_scale, self.granularity),
            routing.ends,
            tokens=None if is_sorted else routing.tokens,
            bias=bias,
            out_dtype=input.dtype,
            impl=self.impl,
        )

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [experts, out, in] as the product sees them."""
        return Quantized(self.weight, self.weight_scale, self.granularity).dequantize(dtype)

    def extra_repr(self) -> str:
        """What a printed model shows of the layer."""
        shape = f"{self.num_experts} experts, {self.in_features} to {self.out_features}"
        settings = self.settings
        return f"{shape}, weight={settings.weight}, activation={settings.activation}"

    def _objection(self, name: str, x: Tensor) -> str | None:
        """Why a tensor cannot be taken; torch would round it without a scale."""
        shape = (self.num_experts, self.out_features, self.in_features)
        fp8 = format_named(self.settings.format).dtype
        shapes = {"weight": shape, "weight_scale": self.granularity.scale_shape(shape)}
        dtype, expected = fp8 if name == "weight" else torch.float32, shapes.get(name, ())
        if x.dtype != dtype or tuple(x.shape) != expected:
            return f"expected {dtype} {list(expected)}, got {x.dtype} {list(x.shape)}"
        if name != "weight" and not x.is_meta and not bool((x.isfinite() & (x > 0)).all()):
            return "expected positive finite scales"
        return None

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {name: state_dict.get(prefix + name) for name in self._buffers}
        problems = [
            f"{prefix}{name}: {problem}"
            for name, x in given.items()
            if x is not None and (problem := self._objection(name, x))
        ]
        error_msgs += problems
        if not problems:
            super()._load_from_state_dict(
                *(state_dict, prefix, local_metadata, strict),
                *(missing_keys, unexpected_keys, error_msgs),
            )


def run_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Fp8ExpertLinear,
    down: Fp8ExpertLinear,
    activate: Callable[[Tensor], Tensor],
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """What a mixture of experts makes of tokens x [tokens, in]: [tokens, out] in x's dtype.

    index, weights: [tokens, top k], the experts of each token and what their results count. up: of
    gate and up as well, whose common input is quantized once. activate: from up's result to down's
    input, such as a gate times the other half. norm: of each expert's result.
    """
    check_one_device(x=x, index=index, weights=weights, up=up.weight, down=down.weight)
    if index.dim() != 2 or index.shape != weights.shape or len(index) != len(x):
        raise ConfigError(
            f"expected index and weights [{len(x)}, top k], got {list(index.shape)} and "
            f"{list(weights.shape)}"
        )
    routing = route(index, up.num_experts)
    rows = activate(up(x, routing, up_bias, is_sorted=False))
    rows = down(rows, routing, down_bias, is_sorted=True)
    if norm is not None:
        rows = norm(rows)
    # [tokens, top k, out]: a sum in one order, whatever the routing is.
    results = rows[routing.places] * weights.unsqueeze(-1)
    return results.sum(dim=1).to(x.dtype)

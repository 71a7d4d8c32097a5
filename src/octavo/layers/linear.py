"""Fp8Linear: a linear layer with an FP8 weight, and FP8 activations unless only the weight is."""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import ops
from octavo.errors import CheckpointError, ConfigError
from octavo.internals import require
from octavo.layers.saturation import SaturationCounter
from octavo.numerics.buffers import Float32Buffers
from octavo.numerics.formats import format_named
from octavo.numerics.granularity import (
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    parse_granularity,
)
from octavo.numerics.quantize import Quantized, quantize
from octavo.numerics.scales import amax_to_scale, finite_amax
from octavo.ops.check import FLOAT_DTYPES, check_float, check_fp8_device, fp8_objection
from octavo.recipe import LinearSettings

require(
    "torch.nn.Module._buffers",
    "torch.nn.Module._load_from_state_dict",
    "torch.nn.Module._parameters",
    "torch.nn.Module._save_to_state_dict",
)

# What FP8 matrix products read at once; other sizes would leave the fast implementations.
ALIGNMENT = 16
# So few rows the op quantizes while the product already starts, as a compiler's kernels do not.
FEW_ROWS = 64
# Of wider rows a compiler computes what is in front twice, for amax and for the values. H200, GELU
# of 4608 x 15360 and its quantization: 188 us in one kernel of the compiler.
MAX_FUSED = 8192
WITHOUT_FP8 = "quantize the weight alone (activation=None), or leave the layer as the model has it"


class Fp8Linear(Float32Buffers, nn.Linear):
    """x · weightᵀ + bias, with the weight in e4m3 and x quantized on the way in.

    weight: float8 buffer [out, in]; weight_scale: float32, [] per tensor, [out] per channel,
    [⌈out/128⌉, ⌈in/128⌉] per block; input_scale: float32 [], of static scaling alone. Sizes that
    are no multiples of 16 are padded with zeros here and true in the state dict. The buffers keep
    their bits when the model changes its dtype; results have the dtype of x.

    shards: the outputs of each of the projections that were fused into this one. Per tensor, each
    has a scale of its own: the state dict has [num_shards], the product one for each channel.
    name: what errors call the layer. impl: of the op `scaled_mm`.

    A layer that is made, not converted by `from_linear`, has NaN scales until it is loaded.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    # Of static scaling. None on the class: a layer pickled by an older octavo has none.
    saturation: SaturationCounter | None = None
    # Of the last input: a device that can run the layer.
    _good_device: torch.device | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        settings: LinearSettings,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        shards: tuple[int, ...] | None = None,
        name: str = "",
        impl: str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.settings, self.name, self.impl = settings, name, impl
        self.label = f"linear layer {name or '(unnamed)'}"
        self.weight_granularity = parse_granularity(settings.weight)
        self.activation = parse_granularity(settings.activation) if settings.activation else None
        self.shards = self._check_sizes(shards)
        # How the product sees the weight: shards with scales of their own are channels.
        is_sharded = len(self.shards) > 1 and isinstance(self.weight_granularity, PerTensor)
        self.product_granularity = PerChannel() if is_sharded else self.weight_granularity
        # Whether a plain weight was given up for it, which cannot be brought back.
        self.is_converted = False
        # Whether it stands for several layers, whose common input is what a norm has made.
        self.is_joint = False
        self._plain_dtype = dtype or torch.get_default_dtype()
        fp8 = format_named(settings.format).dtype
        shape = (_aligned(out_features), _aligned(in_features))
        scale_shape = self.product_granularity.scale_shape(shape)
        scale = torch.full(scale_shape, torch.nan, dtype=torch.float32, device=device)
        self.register_buffer("weight", torch.zeros(shape, dtype=fp8, device=device))
        self.register_buffer("weight_scale", scale)
        is_static = settings.scaling == "static"
        self.register_buffer("input_scale", scale.new_full((), torch.nan) if is_static else None)
        self.saturation = SaturationCounter(name) if is_static else None
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape[0], dtype=dtype, device=device), False)
        else:
            self.register_parameter("bias", None)

    def _check_sizes(self, shards: tuple[int, ...] | None) -> tuple[int, ...]:
        sizes = (self.in_features, self.out_features)
        if min(sizes) < 1:
            raise ConfigError(f"{self.label}: expected sizes from 1 on, got {sizes}")
        shards = (self.out_features,) if shards is None else tuple(shards)
        if not shards or min(shards) < 1 or sum(shards) != self.out_features:
            raise ConfigError(
                f"{self.label}: expected shards that add up to {self.out_features} outputs, got "
                f"{shards}"
            )
        if isinstance(self.weight_granularity, PerBlock):
            rows = self.weight_granularity.rows
            if any(size % rows for size in shards[:-1]):
                raise ConfigError(
                    f"{self.label}: expected shards of whole blocks of {rows} outputs, got "
                    f"{shards}; quantize per channel"
                )
        return shards

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        settings: LinearSettings,
        *,
        input_scale: float | None = None,
        shards: tuple[int, ...] | None = None,
        name: str = "",
        impl: str | None = None,
    ) -> Self:
        """The FP8 layer for a plain one, on its device; input_scale: of static scaling."""
        weight = linear.weight.detach()
        bias: Tensor | None = linear.bias
        made = cls(
            linear.in_features,
            linear.out_features,
            settings,
            bias=bias is not None,
            dtype=weight.dtype if bias is None else bias.dtype,
            device=weight.device,
            shards=shards,
            name=name,
            impl=impl,
        )
        made.set_input_scale_(input_scale)
        made.quantize_weight_(weight)
        if bias is not None:
            with torch.no_grad():
                made.bias[: made.out_features] = bias
        made.is_converted = True
        return made.train(linear.training)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What stands on top of the layer computes in; peft asks for it when it adds adapters."""
        bias: Tensor | None = self.bias
        return self._plain_dtype if bias is None else bias.dtype

    @torch.no_grad()
    def quantize_weight_(self, weight: Tensor) -> None:
        """Take a plain weight [out, in] in bf16, fp16 or fp32; NaN and Inf are refused."""
        check_weight(weight, self.label)
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ConfigError(
                f"{self.label}: expected a weight [{self.out_features}, {self.in_features}], got "
                f"{list(weight.shape)}"
            )
        fmt = format_named(self.settings.format)
        scale = None
        if len(self.shards) > 1 and isinstance(self.weight_granularity, PerTensor):
            parts = weight.split(self.shards)
            scale = torch.stack([amax_to_scale(finite_amax(x, PerTensor()), fmt) for x in parts])
            scale = self._placed("weight_scale", scale)[: self.out_features]
        quantized = ops.quantize(weight, self.product_granularity, fmt, scale=scale)
        self.weight = _padded(quantized.data, self._placed_shape("weight"), 0)
        self.weight_scale = _padded(quantized.scale, self._placed_shape("weight_scale"), 1)

    @torch.no_grad()
    def take_(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors by the names and in the shapes of a state dict, without a copy if they fit.

        Unlike load_state_dict it needs no tensors of the same size before: a layer may be made on
        meta. CheckpointError for one that cannot be the layer's.
        """
        is_static, has_bias = self.settings.scaling == "static", self.bias is not None
        known = {"weight": True, "weight_scale": True, "input_scale": is_static, "bias": has_bias}
        for name, x in tensors.items():
            if not known.get(name):
                raise CheckpointError(f"{self.label}: expected no {name}, got {list(x.shape)}")
            dtype = format_named(self.settings.format).dtype if name == "weight" else torch.float32
            if problem := self._objection(name, x, dtype):
                raise CheckpointError(f"{self.label}: {name}: {problem}")
            placed = x if name == "input_scale" else self._placed(name, x)
            setattr(self, name, nn.Parameter(placed, False) if name == "bias" else placed)

    def set_input_scale_(self, input_scale: float | None) -> None:
        """Take the static scale of the activations, which is needed unless scaling is dynamic."""
        if self.input_scale is None:
            if input_scale is not None:
                raise ConfigError(
                    f"{self.label}: expected static scaling for a given input_scale, got "
                    f"{self.settings.scaling}"
                )
            return
        if input_scale is None or not 0 < input_scale < float("inf"):
            raise ConfigError(
                f"{self.label}: scaling is static: expected a positive finite input_scale, got "
                f"{input_scale}"
            )
        self.input_scale.fill_(input_scale)
        if self.saturation is not None:
            self.saturation.reset()  # what was counted was of another scale

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] as the product sees it."""
        quantized = Quantized(self.weight, self.weight_scale, self.product_granularity)
        return quantized.dequantize(dtype)[: self.out_features, : self.in_features]

    def extra_repr(self) -> str:
        """What a printed model shows of the layer."""
        parts = f"{super().extra_repr()}, weight={self.settings.weight}"
        return f"{parts}, activation={self.settings.activation}, scaling={self.settings.scaling}"

    def forward(self, input: Tensor) -> Tensor:
        """input · weightᵀ + bias for [..., in] in bf16, fp16 or fp32, in the input's dtype."""
        self._check_input(input)
        is_compiling = torch.compiler.is_compiling()
        # torch.nn.Module takes long to find an attribute that is a buffer or a parameter.
        buffers, parameters = self._buffers, self._parameters
        # Replicas of torch.nn.DataParallel have attributes in place of parameters.
        bias = parameters["bias"] if parameters else self.bias
        weight, weight_scale, scale = map(buffers.get, ("weight", "weight_scale", "input_scale"))
        assert weight is not None and weight_scale is not None
        if self.saturation is not None and scale is not None and not is_compiling:
            self.saturation.see(input, scale)
        if (num_missing := weight.shape[1] - self.in_features) > 0:
            input = nn.functional.pad(input, (0, num_missing))
        quantized, activation = None, self.activation
        if is_compiling and (quantized := self._quantized(input, scale)) is not None:
            activation = scale = None
        out = ops.scaled_mm(
            input if quantized is None else quantized,
            Quantized(weight, weight_scale, self.product_granularity),
            bias,
            activation=activation,
            scale=scale,
            out_dtype=input.dtype,
            impl=self.impl,
        )
        if out.shape[-1] != self.out_features:
            out = out[..., : self.out_features].contiguous()
        return out if out.dim() == input.dim() else out.view(*input.shape[:-1], self.out_features)

    def _quantized(self, x: Tensor, scale: Tensor | None) -> Quantized | None:
        """The rows of x quantized in plain torch, for a compiler; None if the product does it.

        The compiler makes that a part of the kernel in front, a norm or an activation function,
        which then writes FP8.
        """
        rows = x.reshape(-1, x.shape[-1])
        if scale is not None:
            return quantize(rows, PerTensor(), scale=scale)
        # Two questions: the answer to the second is a guard of the compiled graph.
        if isinstance(self.activation, PerToken) and self.in_features <= MAX_FUSED:  # noqa: SIM102
            if self.is_joint or len(rows) > FEW_ROWS:
                return quantize(rows, self.activation)
        return None

    def _check_input(self, x: Tensor) -> None:
        if x.dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f"{self.label}: expected x in bfloat16, float16 or float32, got {x.dtype}; where "
                "a model casts x to the weight's dtype first, add the layer to ignored_layers"
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ConfigError(
                f"{self.label}: expected x [..., {self.in_features}], got {list(x.shape)}"
            )
        if self.activation is None or self.impl is not None or x.device == self._good_device:
            return
        # torch.compile compiles a layer again for each label that it reads: only to raise.
        if fp8_objection(x.device):
            check_fp8_device(self.label, x.device, self.impl, instead=WITHOUT_FP8)
        if not torch.compiler.is_compiling():
            self._good_device = x.device

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The true shapes of what the state dict has."""
        weight = (self.out_features, self.in_features)
        scale = self.weight_granularity.scale_shape(weight)
        if self.product_granularity != self.weight_granularity:
            scale = (len(self.shards),)
        return {"weight": weight, "weight_scale": scale, "bias": (self.out_features,)}

    def _placed_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as the product takes it: padded."""
        out, depth = _aligned(self.out_features), _aligned(self.in_features)
        if name == "weight_scale":
            return self.product_granularity.scale_shape((out, depth))
        return (out, depth) if name == "weight" else (out,)

    def _placed(self, name: str, x: Tensor) -> Tensor:
        """A tensor of the state dict as the product takes it: one scale per channel, padded."""
        if name == "weight_scale" and self.product_granularity != self.weight_granularity:
            sizes = torch.tensor(self.shards, device=x.device)
            x = x.repeat_interleave(sizes, output_size=self.out_features)
        return _padded(x, self._placed_shape(name), 1 if name == "weight_scale" else 0)

    def _stored(self, name: str, x: Tensor) -> Tensor:
        """The inverse of `_placed`."""
        if name == "weight_scale" and self.product_granularity != self.weight_granularity:
            starts = [sum(self.shards[:index]) for index in range(len(self.shards))]
            return x[torch.tensor(starts, device=x.device)]
        return x[tuple(slice(size) for size in self._shapes()[name])].contiguous()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, shape in self._shapes().items():
            x = destination.get(prefix + name)
            if x is not None and tuple(x.shape) != shape:
                destination[prefix + name] = self._stored(name, x)

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
        placed = dict(state_dict)
        problems = []
        for name in ("weight", "weight_scale", "input_scale", "bias"):
            x, own = placed.get(prefix + name), getattr(self, name)
            if x is None or own is None:
                continue
            if problem := self._objection(name, x, own.dtype):
                problems.append(f"{prefix}{name}: {problem}")
            elif name != "input_scale" and tuple(x.shape) != self._placed_shape(name):
                placed[prefix + name] = self._placed(name, x)
        error_msgs += problems
        if not problems:
            super()._load_from_state_dict(
                *(placed, prefix, local_metadata, strict),
                *(missing_keys, unexpected_keys, error_msgs),
            )

    def _objection(self, name: str, x: Tensor, dtype: torch.dtype) -> str | None:
        """Why a tensor of a state dict cannot be taken; torch would round it without a scale."""
        if name != "bias" and x.dtype != dtype:
            return f"expected {dtype}, got {x.dtype}"
        shape = self._shapes().get(name, ())
        if tuple(x.shape) != shape:
            return f"expected shape {list(shape)}, got {list(x.shape)}"
        if name.endswith("_scale") and not x.is_meta and not bool((x.isfinite() & (x > 0)).all()):
            return "expected positive finite scales"
        return None


def check_weight(weight: Tensor, label: str) -> None:
    """Raise unless a weight can be quantized: plain, in memory and finite; waits for its device."""
    check_float(f"the weight of {label}", weight)
    if weight.is_meta:
        raise ConfigError(f"{label}: expected a weight in memory, got one on meta: load it first")
    # Both are NaN if anything is; isfinite of the whole weight would take twice its memory.
    if not all(math.isfinite(x) for x in torch.stack(torch.aminmax(weight.detach())).tolist()):
        num_bad = weight.numel() - int(torch.isfinite(weight).sum())
        raise ConfigError(f"{label}: expected a finite weight, got {num_bad} NaN or Inf values")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padded(x: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """x at the beginning of a tensor of this shape, `value` behind; x itself if it fits."""
    if tuple(x.shape) == shape:
        return x.contiguous()
    padded = torch.full(shape, value, device=x.device).to(x.dtype)
    padded[tuple(slice(size) for size in x.shape)] = x
    return padded


class OneTokenLinear(nn.Linear):
    """What nn.Linear computes; a single token by `ops.matvec`, which has no tile to fill with it.

    A layer becomes one, and stops to be one, by its class: weights stay where they are.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features]; returns [..., out_features]."""
        if math.prod(input.shape[:-1]) == 1:
            return ops.matvec(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)


def take_single_tokens(module: nn.Module) -> list[nn.Linear]:
    """Turn the plain linear layers inside, `module` too, into OneTokenLinear; returns which."""
    # Not of a subclass, which may compute something else.
    found = [part for part in module.modules() if type(part) is nn.Linear]
    for part in found:
        part.__class__ = OneTokenLinear
    return found


def give_single_tokens_back(layers: list[nn.Linear]) -> None:
    """Turn layers into plain ones again."""
    for layer in layers:
        layer.__class__ = nn.Linear

"""FP8 attention as an attention backend of diffusers.

diffusers' backends are the members of a closed enum, and are told nothing of the layer that calls
them. Ours are appended to it, and set on the processors of single layers: never as the active
backend, which every other model would take. Hooks on a layer leave word for its backend, in the
same thread; in a compiled block both are traced, and the scales of each layer are inputs of one
graph.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from diffusers import AttentionBackendName
from torch import Tensor, nn

from octavo import ops
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.attention_layers import as_tensors
from octavo.integrations.diffusers.processors import (
    BACKEND,
    is_fused,
    put_backend_,
    take_left,
    unfuse_,
)
from octavo.integrations.linear import layer_index
from octavo.integrations.patch import Patch, begin_patch, undo_patches_
from octavo.internals import internals, require
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qkv import QkvScales
from octavo.ops.check import check_fp8_device
from octavo.patterns import Layer
from octavo.recipe import AttentionSettings

with internals("diffusers"):
    from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
    from diffusers.models.attention_dispatch import (
        _AttentionBackendRegistry,
        dispatch_attention_fn,
    )
with internals("torch"):
    from torch import _assert_async
    from torch.overrides import _get_current_function_mode_stack

require(
    "diffusers.models.attention.AttentionModuleMixin._attention_backend",
    "diffusers.models.attention_dispatch._AttentionBackendRegistry",
)

See = Callable[[str, Tensor, Tensor, Tensor], None]
FEATURE, OBSERVED = "attention", "octavo_observed"
_LABEL = "FP8 attention"
NOT_REDUCIBLE = (
    "expected a mask that hides the same keys from all queries and heads (padding), got another "
    "pattern; leave such layers to diffusers: skip_layers"
)


class _Current(threading.local):
    """What the layer that runs has for its backend; observer: name, function, backend to run."""

    def __init__(self) -> None:  # in each thread: a compiled block guards what it finds here
        self.scales: QkvScales | None = None
        self.observer: tuple[str, See, AttentionBackendName | None] | None = None


_CURRENT = _Current()


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a model that ask diffusers for a backend, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(getattr(module, "processor", None), "_attention_backend")
    }


def find_others(model: nn.Module) -> dict[str, str]:
    """The attention layers that ask for no backend, with the reason why they stay."""
    others = {}
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if callable(processor) and not hasattr(processor, "_attention_backend"):
            others[name] = f"{type(processor).__name__} asks for no backend"
    return others


def find_fused(model: nn.Module) -> list[str]:
    """The layers whose norms and rotary embedding are part of the pass that quantizes."""
    return [name for name, layer in find_layers(model).items() if is_fused(layer)]


def as_patterns_see(model: nn.Module) -> list[Layer]:
    """The attention layers as `skip_layers` sees them."""
    return [Layer(name, layer_index(name)) for name in find_layers(model)]


def choose_layers(
    model: nn.Module, skip_layers: frozenset[str] = frozenset()
) -> dict[str, nn.Module]:
    """The layers that `attach` changes, by name; raises whatever is wrong with one."""
    layers = find_layers(model)
    chosen = {name: layer for name, layer in layers.items() if name not in skip_layers}
    if not chosen:
        raise UnsupportedError(
            "attention: expected attention layers that ask diffusers for a backend, got none in "
            f"{type(model).__name__}"
        )
    skipped = {id(layers[name].processor): name for name in layers.keys() - chosen.keys()}
    for name, layer in chosen.items():
        processor = layer.processor
        if (other := skipped.get(id(processor))) is not None:
            raise UnsupportedError(
                f"attention layer {name}: expected a processor of its own, got one that it shares "
                f"with {other}, which is skipped: skip both or none"
            )
        if hasattr(processor, BACKEND):
            raise ConfigError(f"attention layer {name}: expected plain attention, got FP8 already")
        if getattr(processor, "_parallel_config", None) is not None:
            raise UnsupportedError(
                f"attention layer {name}: expected attention on one device, got context parallelism"
            )
    return chosen


def check_scales(
    names: Iterable[str], settings: AttentionSettings, scales: ScaleSet | None
) -> dict[str, QkvScales]:
    """The static scales of these layers; none if they are dynamic."""
    if settings.scaling != "static":
        return {}
    if scales is None:
        raise ConfigError("expected scales for scaling 'static', got none: Recipe(scales=…)")
    scales.require_kind("pipeline")
    scales.require_plain_keys("attention")
    names = list(names)
    scales.require(names)
    return {name: as_tensors(scales.layers[name], settings, name) for name in names}


def attach(
    model: nn.Module,
    settings: AttentionSettings,
    *,
    skip_layers: frozenset[str] = frozenset(),
    scales: ScaleSet | None = None,
    promote_every: int | None = 1,
) -> list[str]:
    """Let a model's attention layers run in FP8; returns their names.

    scales: for static scaling, by the names of the layers.
    """
    chosen = choose_layers(model, skip_layers)
    static = check_scales(chosen, settings, scales)
    member = register(settings, promote_every)
    for layer in chosen.values():
        undo_patches_(layer, FEATURE)  # of a processor that diffusers has replaced
    for name, layer in chosen.items():
        patch = begin_patch(layer, FEATURE)
        if not hasattr(layer.processor, BACKEND):  # one processor may serve several layers
            put_backend_(layer.processor, member, patch)
        if name in static:
            device = next((x.device for x in layer.parameters()), None)
            own = static[name]
            placed = QkvScales(*(x.to(device) for x in (own.q, own.k, own.v)))
            _leave(layer, "scales", placed, patch)  # not always: torch would compile each block
    return list(chosen)


def detach(model: nn.Module) -> list[str]:
    """Give the layers back the backends that they had; returns the names of the layers."""
    names = undo_patches_(model, FEATURE)
    for layer in find_layers(model).values():
        unfuse_(layer.processor)
    return names


def _leave(
    layer: nn.Module, name: str, value: object, patch: Patch, *, always_call: bool = False
) -> None:
    """Let a layer's backend find a value in `_CURRENT`, while the layer runs."""

    def leave(module: nn.Module, args: object) -> None:
        setattr(_CURRENT, name, value)

    def take_back(module: nn.Module, args: object, result: object) -> None:
        setattr(_CURRENT, name, None)

    patch.hook(layer.register_forward_pre_hook(leave))
    patch.hook(layer.register_forward_hook(take_back, always_call=always_call))


def current_scales(query: Tensor) -> QkvScales:
    """The static scales of the layer that runs, on the device of its queries."""
    scales = _CURRENT.scales
    if scales is None:
        raise UnsupportedError(
            "static FP8 attention: expected a call through its layer, got one of its processor "
            "alone, which has no scales"
        )
    return QkvScales(*(x.to(query.device) for x in (scales.q, scales.k, scales.v)))


@contextmanager
def observe_attention(layers: Mapping[str, nn.Module], see: See) -> Iterator[None]:
    """Call `see` with name, q, k and v of these layers, [batch, length, heads, head_dim].

    They run with the backends that they have.
    """
    member = AttentionBackendName(OBSERVED)
    processors: dict[str, Any] = {name: layer.processor for name, layer in layers.items()}
    before = {name: one._attention_backend for name, one in processors.items()}
    with Patch() as patch:
        for name, layer in layers.items():
            _leave(layer, "observer", (name, see, before[name]), patch, always_call=True)
            patch.set(processors[name], "_attention_backend", member)
        yield


def octavo_observed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
    **others: Any,
) -> Any:
    """Show q, k and v, then run the backend that the layer had."""
    if _CURRENT.observer is None:
        raise UnsupportedError(
            "attention: expected a call through its layer to calibrate it, got one of its "
            "processor alone"
        )
    name, see, backend = _CURRENT.observer
    see(name, query, key, value)
    return dispatch_attention_fn(
        *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, others),
        backend=backend,
        parallel_config=_parallel_config,
    )


def add_backend(name: str, run: Callable[..., Any]) -> AttentionBackendName:
    """The enum's member of this name, with `run` as its function if it has none yet.

    diffusers has no public way to add a member, and drops what a backend's signature does not name.
    This one is given whatever any backend takes, and refuses what it cannot do.
    """
    if name not in AttentionBackendName._value2member_map_:
        made: Any = str.__new__(AttentionBackendName, name)
        made._name_, made._value_ = name.upper(), name
        made._sort_order_ = len(AttentionBackendName._member_names_)
        AttentionBackendName._member_names_.append(made._name_)
        AttentionBackendName._member_map_[made._name_] = made
        AttentionBackendName._value2member_map_[name] = made
    member = AttentionBackendName(name)
    if member not in _AttentionBackendRegistry._backends:
        known = set().union(*_AttentionBackendRegistry._supported_arg_names.values())
        _AttentionBackendRegistry.register(member)(run)
        _AttentionBackendRegistry._supported_arg_names[member] |= known
    return member


add_backend(OBSERVED, octavo_observed)


def register(settings: AttentionSettings, promote_every: int | None = 1) -> AttentionBackendName:
    """diffusers' backend for FP8 attention with these settings; made once for each of them.

    A backend learns nothing of the layer that calls it: settings that are not the default have a
    backend of their own.
    """
    name = "octavo"
    if settings.scaling == "static":
        name += "_static"  # whose granularity is that of the layer's scales
    elif settings.granularity != "tensor":
        name += f"_{settings.granularity}"
    if promote_every != 1:
        name += f"_promote_{promote_every or 'never'}"
    return add_backend(name, _make_backend(settings, promote_every))


def _make_backend(settings: AttentionSettings, promote_every: int | None) -> Callable[..., Tensor]:
    granularity = PerHead() if settings.granularity == "head" else PerTensor()
    is_static = settings.scaling == "static"

    def octavo_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: object,
    ) -> Tensor:
        left = take_left()
        _refuse(dropout_p, others)
        _check_shapes(query, key, enable_gqa, is_causal, attn_mask is not None)
        check_fp8_device(_LABEL, query.device, None)
        if _skips_scores() and query.shape == value.shape:
            return value
        mask = None
        if attn_mask is not None:
            sizes = (query.shape[0], query.shape[1], key.shape[1])
            mask = reduce_mask(attn_mask.to(query.device), *sizes)
        streams = None if left is None else left.take_streams((query, key, value))
        qkv, first = ((query, key, value), None) if streams is None else streams
        quantized = ops.quantize_qkv(
            *qkv,
            current_scales(query) if is_static else None,
            granularity=None if is_static else granularity,
            norm=None if left is None else left.qk_norm,
            rotary=None if left is None else left.rotary,
            value_layout="transposed" if query.is_cuda else "rows",
            first=first,
        )
        spec = AttentionSpec(causal=is_causal, softmax_scale=scale, promote_every=promote_every)
        out = ops.attention(
            *(quantized.q, quantized.k, quantized.v, spec, quantized.scales),
            key_mask=None if mask is None else mask.keys,
            out_dtype=query.dtype,
            value_layout=quantized.value_layout,
        )
        if mask is not None and mask.queries is not None:
            out = torch.where(mask.queries[:, :, None, None], out, 0.0)
        return out

    return octavo_attention


def _skips_scores() -> bool:
    """Whether diffusers replaces attention by its values here, as perturbed guidance does."""
    modes = _get_current_function_mode_stack()
    return any(isinstance(mode, AttentionScoreSkipFunctionMode) for mode in modes)


def _refuse(dropout_p: float, others: Mapping[str, object]) -> None:
    """Raise for what was asked for and FP8 attention cannot do."""
    if dropout_p:
        raise UnsupportedError(f"{_LABEL}: expected dropout_p 0, got {dropout_p}")
    for name, value in others.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"{_LABEL}: expected no {name.lstrip('_')}, got {value}")


def _check_shapes(
    query: Tensor, key: Tensor, enable_gqa: bool, is_causal: bool, has_mask: bool
) -> None:
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ConfigError(
            f"{_LABEL}: expected as many KV heads as heads, or enable_gqa, got {key.shape[2]} and "
            f"{query.shape[2]}"
        )
    if is_causal and has_mask:
        raise UnsupportedError(f"{_LABEL}: expected is_causal or a mask, got both")
    if is_causal and query.shape[1] != key.shape[1]:
        # torch lines up the first query with the first key, octavo the last with the last.
        raise UnsupportedError(
            f"{_LABEL}: expected causal queries of the same tokens as the keys, got "
            f"{query.shape[1]} queries and {key.shape[1]} keys"
        )


class ReducedMask(NamedTuple):
    """A mask that is the product of two: the keys that are seen, and the queries that see them.

    keys: bool [batch, kv_len]. queries: bool [batch, q_len], or None where all of them count; a
    query that sees nothing has the result 0, as in torch.
    """

    keys: Tensor
    queries: Tensor | None


def reduce_mask(mask: Tensor, batch_size: int, q_len: int, kv_len: int) -> ReducedMask:
    """What a bool mask of diffusers means; UnsupportedError if it is not padding.

    mask: [batch, kv_len] as in diffusers, or what broadcasts to [batch, heads, q_len, kv_len]. One
    that differs by query is looked at, which waits for the device; a compiled or captured graph
    asserts it there.
    """
    if mask.dtype != torch.bool:
        raise UnsupportedError(
            f"expected a bool mask, True where a key is seen, got {mask.dtype}: FP8 attention adds "
            "no bias; leave such layers to diffusers: skip_layers"
        )
    full = _four_dims(mask, batch_size, q_len, kv_len)
    if full.shape[1] > 1:
        _require((full == full[:, :1]).all())
        full = full[:, :1]
    if full.shape[2] == 1:
        return ReducedMask(full[:, 0, 0].expand(batch_size, kv_len), None)
    full = full[:, 0].expand(-1, q_len, kv_len)
    queries, keys = full.any(-1), full.any(-2)
    # Every visible pair lies in queries × keys: the mask is that product if there are as many.
    num_product = queries.sum(-1) * keys.sum(-1)
    _require((full.sum((-2, -1)) == num_product).all())
    return ReducedMask(keys.expand(batch_size, -1), queries.expand(batch_size, -1))


def _four_dims(mask: Tensor, batch_size: int, q_len: int, kv_len: int) -> Tensor:
    if tuple(mask.shape) == (batch_size, kv_len):  # diffusers' reading of two dimensions
        return mask[:, None, None]
    full = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    sizes = (batch_size, None, q_len, kv_len)
    is_fitting = full.dim() == 4 and all(
        # Not `size in (1, expected)`: while compiling, sizes that are symbols are in nothing.
        expected is None or size == 1 or size == expected
        for size, expected in zip(full.shape, sizes, strict=True)
    )
    if not is_fitting:
        raise ConfigError(
            f"expected a mask that broadcasts to [{batch_size}, heads, {q_len}, {kv_len}], got "
            f"{list(mask.shape)}"
        )
    return full


def _require(condition: Tensor) -> None:
    is_captured = condition.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or is_captured:
        _assert_async(condition, NOT_REDUCIBLE)
    elif not bool(condition):
        raise UnsupportedError(NOT_REDUCIBLE)

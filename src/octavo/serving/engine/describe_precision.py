"""What of a model is in FP8, read off its layers and its cache."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from octavo.cache.storage import PagedStorage
from octavo.integrations.linear import find_linear
from octavo.integrations.transformers import vision
from octavo.integrations.transformers.engine_images import has_vision
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.layers.encoder_attention import EncoderAttention
from octavo.layers.linear import Fp8Linear
from octavo.numerics.formats import E4M3, is_fp8
from octavo.serving.engine.precision import CachePart, LayerPrecision, Precision

DTYPE_WORDS = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}


def describe_engine(model: EngineModel, storage: PagedStorage) -> Precision:
    """The precision of a model as an engine runs it."""
    layers = [_kv_cache(model, storage), describe_linear({"": model.model})]
    if has_vision(model.model):
        layers.append(_vision_attention(model.model))
    return Precision(tuple(layers), tuple(_cache_parts(model, storage)))


def describe_linear(models: Mapping[str, nn.Module]) -> LayerPrecision:
    """The linear layers of several models, by the names of these; experts count as one layer."""
    others, fp8 = {}, []
    for component, model in models.items():
        for name, layer in find_linear(model).items():
            if isinstance(layer, Fp8Linear):
                fp8.append(layer)
            else:
                others[".".join(filter(None, (component, name)))] = _dtype_of(layer)
    num_weight_only = sum(layer.activation is None for layer in fp8)
    note = ""
    if num_weight_only:
        note = "weights only" + ("" if num_weight_only == len(fp8) else f" in {num_weight_only}")
    return LayerPrecision(kind="linear", num_fp8=len(fp8), others=others, note=note)


def dtype_word(dtype: torch.dtype) -> str:
    """BF16, FP16, …: what people call a dtype."""
    return DTYPE_WORDS.get(dtype, str(dtype).removeprefix("torch."))


def _dtype_of(layer: nn.Module) -> str:
    """The dtype of a layer's own weights."""
    return dtype_word(next(layer.parameters()).dtype)


def _kv_cache(model: EngineModel, storage: PagedStorage) -> LayerPrecision:
    spec, word = storage.spec, dtype_word(model.dtype)
    others = {layer.name: word for layer in model.attention if layer.dtype is None}
    is_usual = spec.dtype == E4M3.dtype or not is_fp8(spec.dtype)
    return LayerPrecision(
        kind="kv_cache",
        num_fp8=len(model.attention) - len(others),
        others=others,
        note="" if is_usual else str(spec.dtype).removeprefix("torch.float8_"),
    )


def _vision_attention(model: Any) -> LayerPrecision:
    found = vision.find_layers(model)
    others = {
        name: dtype_word(model.dtype) for name, module in found.items() if not _is_fp8(module)
    }
    return LayerPrecision(kind="vision_attention", num_fp8=len(found) - len(others), others=others)


def _is_fp8(module: nn.Module) -> bool:
    layer = getattr(module, vision.CHILD, None)
    return isinstance(layer, EncoderAttention) and layer.scaling is not None


def _cache_parts(model: EngineModel, storage: PagedStorage) -> Iterator[CachePart]:
    sizes: Counter[tuple[str, str, str]] = Counter()
    parts = {
        "pages": (storage.key_pages, storage.value_pages),
        "scales": (storage.key_scales, storage.value_scales),
    }
    for index, layer in enumerate(model.attention):
        kind = "full_attention" if layer.spec.window is None else "sliding_window"
        for part, groups in parts.items():
            for group in groups:
                dtype = str(group[index].dtype).removeprefix("torch.")
                sizes[kind, dtype, part] += group[index].nbytes
    for (kind, dtype, part), num_bytes in sorted(sizes.items()):
        yield CachePart(kind=kind, dtype=dtype, part=part, num_bytes=num_bytes)

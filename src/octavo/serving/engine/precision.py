"""Which layers of a model are in FP8, how large its KV cache is, and both in words."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

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

LayerKind = Literal["kv_cache", "linear", "vision_attention", "attention"]
TITLES: Mapping[LayerKind, str] = {
    "kv_cache": "KV cache",
    "linear": "linear layers",
    "vision_attention": "vision attention",
    "attention": "attention",
}


@dataclass(frozen=True, kw_only=True)
class LayerPrecision:
    """The layers of one kind: how many are in FP8, and the dtypes of the others by layer.

    note: what else there is to say of those in FP8.
    """

    kind: LayerKind
    num_fp8: int
    others: Mapping[str, str]
    note: str = ""

    @property
    def num_layers(self) -> int:
        """All layers of this kind."""
        return self.num_fp8 + len(self.others)

    def __str__(self) -> str:
        if not self.num_fp8:
            return " and ".join(sorted(set(self.others.values())))
        how_many = f"{self.num_fp8} of {self.num_layers}" if self.others else f"all {self.num_fp8}"
        unit = "" if self.kind == "linear" else " layers"  # their title says it
        told = [self.note] if self.note else []
        if len(self.others) == 1:
            told += [f"{name} in {dtype}" for name, dtype in self.others.items()]
        else:
            told += [f"{num} in {dtype}" for dtype, num in Counter(self.others.values()).items()]
        return f"FP8 in {how_many}{unit}" + (f" ({', '.join(told)})" if told else "")


@dataclass(frozen=True, kw_only=True)
class CachePart:
    """Memory of the KV cache, all layers of a kind together.

    kind: "full_attention" or "sliding_window"; part: "pages" or "scales"; dtype: of the tensors.
    """

    kind: str
    dtype: str
    part: str
    num_bytes: int


@dataclass(frozen=True)
class Precision:
    """What is in FP8 and what is not; a model without a kind of layer has no entry for it."""

    layers: tuple[LayerPrecision, ...] = ()
    cache: tuple[CachePart, ...] = ()

    def words(self) -> dict[str, str]:
        """A phrase for each kind of layer, by what people call it."""
        found = {TITLES[layers.kind]: str(layers) for layers in self.layers}
        if self.cache:
            gib = sum(part.num_bytes for part in self.cache) / 2**30
            size = f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"
            found[TITLES["kv_cache"]] += f", {size}"
        return found

    def __str__(self) -> str:
        return "; ".join(f"{title}: {phrase}" for title, phrase in self.words().items())


DTYPE_WORDS = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}


def describe_engine(model: EngineModel, storage: PagedStorage) -> Precision:
    """The precision of a model as an engine runs it."""
    dtype = storage.spec.dtype
    is_usual = dtype == E4M3.dtype or not is_fp8(dtype)
    note = "" if is_usual else str(dtype).removeprefix("torch.float8_")
    cached = {x.name: model.dtype if x.dtype is None else None for x in model.attention}
    layers = [describe_layers("kv_cache", cached, note), describe_linear({"": model.model})]
    if has_vision(model.model):
        found = vision.find_layers(model.model)
        seen = {name: None if _is_fp8(layer) else model.dtype for name, layer in found.items()}
        layers.append(describe_layers("vision_attention", seen))
    return Precision(tuple(layers), tuple(_cache_parts(model, storage)))


def describe_layers(
    kind: LayerKind, dtypes: Mapping[str, torch.dtype | None], note: str = ""
) -> LayerPrecision:
    """The layers of one kind by their dtypes, None for those in FP8."""
    words = {
        name: DTYPE_WORDS.get(dtype, str(dtype).removeprefix("torch."))
        for name, dtype in dtypes.items()
        if dtype is not None
    }
    return LayerPrecision(kind=kind, num_fp8=len(dtypes) - len(words), others=words, note=note)


def describe_linear(models: Mapping[str, nn.Module]) -> LayerPrecision:
    """The linear layers of several models, by the names of these; experts count as one layer."""
    layers = {
        ".".join(filter(None, (component, name))): layer
        for component, model in models.items()
        for name, layer in find_linear(model).items()
    }
    fp8 = [layer for layer in layers.values() if isinstance(layer, Fp8Linear)]
    num_weight_only = sum(layer.activation is None for layer in fp8)
    note = ""
    if num_weight_only:
        note = "weights only" + ("" if num_weight_only == len(fp8) else f" in {num_weight_only}")
    dtypes = {
        name: None if isinstance(layer, Fp8Linear) else next(layer.parameters()).dtype
        for name, layer in layers.items()
    }
    return describe_layers("linear", dtypes, note)


def _is_fp8(module: nn.Module) -> bool:
    layer = getattr(module, vision.CHILD, None)
    return isinstance(layer, EncoderAttention) and layer.scaling is not None


def _cache_parts(model: EngineModel, storage: PagedStorage) -> Iterator[CachePart]:
    sizes: Counter[tuple[str, str, str]] = Counter()
    for index, layer in enumerate(model.attention):
        kind = "full_attention" if layer.spec.window is None else "sliding_window"
        for part, groups in (
            ("pages", (storage.key_pages, storage.value_pages)),
            ("scales", (storage.key_scales, storage.value_scales)),
        ):
            for group in groups:
                dtype = str(group[index].dtype).removeprefix("torch.")
                sizes[kind, dtype, part] += group[index].nbytes
    for (kind, dtype, part), num_bytes in sorted(sizes.items()):
        yield CachePart(kind=kind, dtype=dtype, part=part, num_bytes=num_bytes)

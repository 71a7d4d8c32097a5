"""Which layers of a model are in FP8, how large its KV cache is, and both in words: no tensors."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
            found[TITLES["kv_cache"]] += f", {_size(sum(part.num_bytes for part in self.cache))}"
        return found

    def __str__(self) -> str:
        return "; ".join(f"{title}: {phrase}" for title, phrase in self.words().items())


def _size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.1f} MiB"

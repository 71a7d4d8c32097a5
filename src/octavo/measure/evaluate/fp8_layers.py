"""How many layers are really in FP8, for records: what ran, not what was asked for."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from octavo.layers.decoder_attention import DecoderAttention
from octavo.layers.encoder_attention import EncoderAttention
from octavo.serving.engine.precision import LayerPrecision, describe_linear


def layers_that_ran(layers: Iterable[LayerPrecision]) -> dict[str, float]:
    """The number of layers in FP8 of each kind, as an engine describes them."""
    return {f"num_fp8_{own.kind}_layers": float(own.num_fp8) for own in layers}


def _fp8_layers(model: Any) -> dict[str, float]:
    """Those of a model of transformers as a recipe has it."""
    modules = list(model.modules())
    cached = [m for m in modules if isinstance(m, DecoderAttention)]
    seen = [m for m in modules if isinstance(m, EncoderAttention)]
    return {
        **layers_that_ran([describe_linear({"": model})]),
        "num_fp8_kv_cache_layers": float(sum(m.dtype is not None for m in cached)),
        "num_fp8_vision_attention_layers": float(sum(m.scaling is not None for m in seen)),
    }


@contextmanager
def watched(
    open: Callable[[], AbstractContextManager[Any]], ran: dict[str, float]
) -> Iterator[Any]:
    """A model as a recipe has it while this is entered; `ran` gets the numbers of its layers."""
    with open() as model:
        ran.update(_fp8_layers(model))
        yield model

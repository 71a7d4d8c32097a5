"""The bytes that FP8 saves in a server, beside the same weights and pages in the model's dtype."""

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.serving.engine.precision import TITLES, CachePart

FP8 = "float8_"  # how the names of its dtypes begin


def saved_bytes(models: Iterable[Any], cache: Iterable[CachePart] = ()) -> Mapping[str, int]:
    """The bytes that are saved, by what is in FP8; scales, which FP8 needs, are taken off.

    models: the modules that are served; pages of `cache` would have the first one's dtype.
    """
    served = list(models)
    pages = [part for part in cache if part.part == "pages" and part.dtype.startswith(FP8)]
    scales = sum(part.num_bytes for part in cache if part.part == "scales" and pages)
    cached = sum(part.num_bytes * _more_bytes(served[0]) for part in pages) - scales
    found = {TITLES["kv_cache"]: cached, TITLES["linear"]: sum(map(_saved_weights, served))}
    return {title: num_bytes for title, num_bytes in found.items() if num_bytes > 0}


def _more_bytes(model: Any) -> int:
    """By how many bytes a value in the model's dtype is larger than one in FP8."""
    dtype = getattr(model, "dtype", None)
    return 1 if dtype is None else int(dtype.itemsize) - 1


def _saved_weights(model: Any) -> int:
    saved = 0
    for module in model.modules():
        parameters, buffers = (
            dict(named(recurse=False)) for named in (module.named_parameters, module.named_buffers)
        )
        own = parameters | buffers
        fp8 = [tensor for tensor in own.values() if f"torch.{FP8}" in str(tensor.dtype)]
        if fp8:
            saved += sum(tensor.nbytes for tensor in fp8) * _more_bytes(model)
            saved -= sum(tensor.nbytes for name, tensor in own.items() if name.endswith("_scale"))
    return saved

"""What runs a model inside vLLM: a function that workers of other processes import."""

from typing import Any


def look(model: Any) -> dict[str, Any]:
    """What runs a model's layers: class, cache and scales of attention; method and FP8 settings."""
    attention, methods = {}, {}
    for name, module in model.named_modules():
        if (impl := getattr(module, "impl", None)) is not None:
            scales = (module._k_scale.tolist(), module._v_scale.tolist())
            attention[name] = (type(impl).__name__, str(module.kv_cache.dtype), *scales)
        if (method := getattr(module, "quant_method", None)) is not None:
            made = getattr(module, "octavo_linear", None)
            methods[name] = (type(method).__name__, None if made is None else str(made.settings))
    return {"attention": attention, "methods": methods}

"""What runs a model inside vLLM: a function that workers of other processes import."""

from typing import Any

from vllm.model_executor.layers.attention import MMEncoderAttention


def look(model: Any) -> dict[str, Any]:
    """What runs a model's layers.

    attention: class, cache and scales. encoder: class and FP8 scaling of attention in encoders.
    methods: of linear layers, and their FP8 settings.
    """
    attention, encoder, methods = {}, {}, {}
    for name, module in model.named_modules():
        if (impl := getattr(module, "impl", None)) is not None:
            scales = (module._k_scale.tolist(), module._v_scale.tolist())
            attention[name] = (type(impl).__name__, str(module.kv_cache.dtype), *scales)
        if isinstance(module, MMEncoderAttention):
            made = getattr(module, "octavo", None)
            encoder[name] = (type(module).__name__, None if made is None else scaling_of(made))
        if (method := getattr(module, "quant_method", None)) is not None:
            made = getattr(module, "octavo_linear", None)
            methods[name] = (type(method).__name__, None if made is None else str(made.settings))
    return {"attention": attention, "encoder": encoder, "methods": methods}


def scaling_of(layer: Any) -> dict[str, Any]:
    """How an octavo layer finds its scales, how many passes it has seen, and the scales."""
    scaling = layer.scaling
    passes = getattr(scaling, "num_passes", None)
    return {
        "kind": type(scaling).__name__,
        "num_passes": None if passes is None else int(passes),
        **{key: float(scale) for key, scale in vars(scaling.scales()).items()},
    }

"""Static scales of keys, values and queries from a text, while the model runs as it is."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.observers import CalibrationSettings, LayerObserver
from octavo.calibration.run import Calibration, CalibrationResult, See
from octavo.calibration.run import calibrate as run_calibration
from octavo.calibration.scale_file import ScaleHeader
from octavo.errors import ConfigError
from octavo.integrations.transformers.text import find_layers
from octavo.layers.decoder_attention import DecoderAttention

# Without "flash" or "sdpa" in it: transformers reads meaning into such names.
IMPLEMENTATION = "octavo_observe_text"


def calibrate_text(
    model: nn.Module,
    windows: Iterable[Tensor],
    settings: CalibrationSettings,
    *,
    header: ScaleHeader | None = None,
    on_window: Callable[[int], None] = lambda num_windows: None,
) -> CalibrationResult:
    """Scales of a decoder's layers by what it computes for these windows of tokens, [length] each.

    Every window runs in one pass, in the model's own dtype; on_window is told how many are done.
    """
    device = next(model.parameters()).device

    def forward(batch: Any) -> None:
        model(input_ids=batch[0].to(device)[None], use_cache=False, logits_to_keep=1)

    calibration = run_calibration(
        Calibration(list(find_layers(model)), settings),
        ([window] for window in windows),
        observe=partial(observe_text, model),
        forward=forward,
        on_batch=on_window,
    )
    return calibration.result(header)


@contextmanager
def observe_text(model: nn.Module, see: See) -> Iterator[None]:
    """Call `see(name, q, k, v)` for every pass of every layer; attention is that of the model.

    q, k and v are [batch, length, heads, head_dim], after rotary embedding, as a cache would store
    them. The model is as it was when the context ends.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    found = find_layers(model)
    if any(isinstance(module, DecoderAttention) for module in model.modules()):
        raise ConfigError("expected a KV cache in its own dtype, got FP8: restore_ it first")
    names = {id(module): name for name, module in found.items()}
    configs: list[Any] = [module.config for module in found.values()]
    previous = configs[0]._attn_implementation

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        see(names[id(module)], *(x.transpose(1, 2) for x in (query, key, value)))
        return _attention_of(module, previous)(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS[previous])
    try:
        for config in configs:
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for config in configs:
            config._attn_implementation = previous


def _attention_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """The attention function that a module would call under this name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # As the module itself looks it up: eager attention is not in the registry.
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


def observe_windows(
    model: nn.Module, windows: Iterable[Tensor], settings: CalibrationSettings
) -> dict[str, LayerObserver]:
    """What each layer's queries, keys and values were in these windows, by name."""
    calibration = Calibration(list(find_layers(model)), settings)
    device = next(model.parameters()).device
    with observe_text(model, calibration.see), torch.inference_mode():
        for window in windows:
            model(input_ids=window.to(device)[None], use_cache=False, logits_to_keep=1)
    return {name: layer for name, layer in calibration.layers.items() if layer is not None}

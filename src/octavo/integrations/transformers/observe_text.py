"""Watching what a decoder's attention layers are given, while the model runs as it is.

The hook is transformers' table of attention functions: under a name of our own stands a function
that shows q, k and v and then calls the one that the model used before, with the masks of that one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from octavo.calibration.run import See
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.text import find_layers
from octavo.internals import internals, require

_ATTRIBUTE = "octavo_see_text"


@contextmanager
def observe_text(model: nn.Module, see: See) -> Iterator[None]:
    """Call `see(name, q, k, v)` for every pass of every attention layer of a decoder.

    q is [batch, length, num_heads, head_dim]; k and v are [batch, length, num_kv_heads, head_dim],
    after norms and rotary embedding: as a KV cache stores them. All positions are shown, so batches
    come without padding, and without a cache. The model is as it was when the context ends.
    """
    require("transformers.PreTrainedConfig._attn_implementation")
    found = find_layers(model)
    before = [(module, _implementation(name, module)) for name, module in found.items()]
    try:
        for name, (module, implementation) in zip(found, before, strict=True):
            attend = _attention_function(name, module, implementation)
            setattr(module, _ATTRIBUTE, (name, see, attend))
            _config(module)._attn_implementation = _register(implementation)
        yield
    finally:
        for module, implementation in before:
            _config(module)._attn_implementation = implementation
            vars(module).pop(_ATTRIBUTE, None)


def _config(module: nn.Module) -> Any:
    return module.config


def _implementation(name: str, module: nn.Module) -> str:
    found = _config(module)._attn_implementation
    if not isinstance(found, str):
        raise ConfigError(f"{name}: expected the name of an attention function, got {found}")
    if found.startswith("octavo"):
        raise ConfigError("expected a model in its own dtype, got one in FP8: restore_ it first")
    return found


def _attention_function(name: str, module: nn.Module, implementation: str) -> Any:
    """What the module would call; its own file may replace functions of the common table."""
    modeling = sys.modules[type(module).__module__]
    table = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    eager = getattr(modeling, "eager_attention_forward", None)
    if table is None or (implementation == "eager" and eager is None):
        raise UnsupportedError(
            f"{name}: expected attention by transformers' table of attention functions, got "
            f"{type(module).__name__}, which has its own"
        )
    return eager if implementation == "eager" else table[implementation]


def _register(implementation: str) -> str:
    """The observing name for an attention function; models look for words such as flash in it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    with internals("transformers"):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"octavo_observe_{implementation}"
    AttentionInterface.register(name, _attend)
    # A name without a mask function gets no masks: as before, then.
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """What transformers calls: q, k, v [batch, heads, length, head_dim]."""
    name, see, attend = getattr(module, _ATTRIBUTE)
    if key.shape[-2] != query.shape[-2]:
        raise UnsupportedError(
            f"{name}: expected a pass without a cache, as many keys as queries, got "
            f"{key.shape[-2]} and {query.shape[-2]}: set use_cache=False"
        )
    see(name, *(x.transpose(1, 2) for x in (query, key, value)))
    return attend(module, query, key, value, *args, **kwargs)

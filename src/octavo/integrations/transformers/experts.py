"""Mixtures of experts of transformers in FP8, as an implementation in its registry.

A mixture that is quantized keeps its module, and with it the gate, the activation function, the
norm and the biases that its model gave it. Its 3-D weights become layers in FP8 beside them, and
its own copy of the config names octavo's implementation; others of the model stay as they are.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from octavo.errors import UnsupportedError
from octavo.integrations.checkpoints.linear_layers import EXPERTS_PREFIX
from octavo.integrations.linear import has_hooks
from octavo.internals import internals, require
from octavo.layers.experts import Fp8ExpertLinear, run_experts
from octavo.layers.linear import WITHOUT_FP8, check_weight
from octavo.ops.check import check_fp8_device
from octavo.recipe import LinearSettings

with internals("transformers"):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "octavo"
# What the layers in FP8 are called. Names that transformers' patterns for experts do not match:
# it would take the weights of such a name apart when it saves a model.
PREFIX = EXPERTS_PREFIX
# What transformers calls the weights of experts.
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of a mixture's forward: [tokens, in] to [tokens, out]."""
    up_name = up_projection(module)
    bias = (None, None)
    if module.has_bias:
        bias = (getattr(module, f"{up_name}_bias"), module.down_proj_bias)
    has_norm = getattr(module, "has_post_expert_norm", False)  # since transformers 5.18
    return run_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        getattr(module, PREFIX + up_name),
        module.fp8_down_proj,
        module._apply_gate if module.has_gate else module.act_fn,
        up_bias=bias[0],
        down_bias=bias[1],
        norm=module.post_expert_norm if has_norm else None,
    )


def up_projection(module: Any) -> str:
    """The name of the weight that experts begin with."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def check_experts(model: nn.Module, settings: Mapping[str, LinearSettings]) -> None:
    """Raise whatever `quantize_experts_` would find wrong with a mixture."""
    for name, own in settings.items():
        module: Any = model.get_submodule(name)
        check_module(name, module)
        for leaf, weight in weights_of(module):
            if own.activation is not None:
                check_fp8_device(name, weight.device, None, instead=WITHOUT_FP8)
            check_weight(weight, f"{name}.{leaf}")


def check_module(name: str, module: Any) -> None:
    """Raise unless a mixture has its weights where octavo looks for them."""
    leaves = [leaf for leaf, _ in weights_of(module)]
    if leaves != [up_projection(module), "down_proj"]:
        raise UnsupportedError(
            f"{name}: expected 3-D weights {up_projection(module)} and down_proj, got "
            f"{', '.join(leaves) or 'none'}: add {name} to ignored_layers"
        )
    if has_hooks(module):
        raise UnsupportedError(
            f"{name}: expected experts without hooks, got some: remove them (offloaded weights and "
            "experts spread over devices have hooks, too) or ignore the layer"
        )


def quantize_experts_(model: nn.Module, settings: Mapping[str, LinearSettings]) -> None:
    """Put mixtures into FP8, one weight after the other; settings: of each, by name."""
    for name, own in settings.items():
        module: Any = model.get_submodule(name)
        for leaf, weight in list(weights_of(module)):
            put_(module, leaf, quantized(f"{name}.{leaf}", module, weight, own))


def quantized(name: str, module: Any, weight: Tensor, settings: LinearSettings) -> Fp8ExpertLinear:
    """One weight of a mixture in FP8; name: its own."""
    return Fp8ExpertLinear.from_weight(
        weight,
        settings,
        is_transposed=module.is_transposed,
        parts=_parts(module, weight) if "gate_up" in name.rpartition(".")[2] else (slice(None),),
        name=name,
    )


def put_(module: Any, leaf: str, layer: Fp8ExpertLinear) -> None:
    """Give a mixture a layer in FP8 in place of one of its weights, and octavo's implementation."""
    require(
        "transformers.PreTrainedConfig._experts_implementation",
        "transformers.models.mixtral.modeling_mixtral.MixtralExperts",
    )
    delattr(module, leaf)
    setattr(module, PREFIX + leaf, layer)
    keep_(module)
    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run)
    if module.config._experts_implementation != IMPLEMENTATION:
        module.config = copy.deepcopy(module.config)
        module.config._experts_implementation = IMPLEMENTATION


def keep_(module: Any) -> None:
    """Let transformers draw no weights for a module: it would look for those that are gone."""
    require("transformers.PreTrainedModel._is_hf_initialized")
    module._is_hf_initialized = True


def weights_of(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The 3-D weights of a mixture by name, the first product's first."""
    weights = {n: x for n, x in module.named_parameters(recurse=False) if x.dim() == 3}
    yield from sorted(weights.items(), key=lambda item: item[0] == "down_proj")


def _parts(module: Any, weight: Tensor) -> tuple[slice, ...]:
    """The outputs of the gate, and those of what it is multiplied with."""
    if not module.is_concatenated:
        return slice(0, None, 2), slice(1, None, 2)
    half = weight.shape[2 if module.is_transposed else 1] // 2
    return slice(0, half), slice(half, None)

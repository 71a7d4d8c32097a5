"""Projections of transformers models that are given the same input, as one product in FP8."""

from torch import nn

from octavo.integrations.transformers.text import is_attention
from octavo.layers.joint_linear import join_children_

# What decoders call projections of the same tokens.
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
JOINT = (ATTENTION, MLP)


def join_projections_(model: nn.Module) -> list[tuple[str, ...]]:
    """Join the FP8 projections in a model's own modules wherever they read the same tokens.

    An MLP's do in all models of transformers. Those of attention do where it is a decoder's, causal
    over keys and values of its own: cross-attention has the same names for two inputs, and one
    class is both in many encoder-decoders. Returns the names of the layers of each product.
    """
    joined = []
    for module in list(model.modules()):
        if _is_of_transformers(module):
            joined += join_children_(module, JOINT if _has_one_input(module) else (MLP,))
    return [tuple(layer.name for layer in joint.layers) for joint in joined]


def _has_one_input(module: nn.Module) -> bool:
    """Whether q, k and v of an attention module are of the same tokens, and all are computed."""
    return is_attention(module) and not getattr(module, "is_kv_shared_layer", False)


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether a module's class is of transformers or of a model's remote code, or extends one."""
    packages = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    return not packages.isdisjoint({"transformers", "transformers_modules"})

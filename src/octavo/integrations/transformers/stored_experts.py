"""Mixtures of experts that a checkpoint has in FP8, put where the model has plain ones."""

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.linear_layers import StoredLinear
from octavo.integrations.checkpoints.tensor_files import TensorEntry
from octavo.integrations.linear import is_experts
from octavo.integrations.transformers import experts
from octavo.layers.experts import Fp8ExpertLinear
from octavo.recipe import LinearSettings


def place_own(
    model: Any,
    found: Mapping[str, TensorEntry],
    settings: LinearSettings,
    rename: Callable[[str], str],
) -> None:
    """Make room for mixtures as octavo saves them, all experts in one tensor in FP8.

    found: the FP8 weights of a checkpoint, by layer. rename: from a tensor's name there to the
    model's, but for the prefix of a base model, which is added only to names that the model has.
    """
    renamed = {rename(f"{layer}.weight").removesuffix(".weight") for layer in found}
    own = {name for name in renamed if name.rpartition(".")[2].startswith(experts.PREFIX)}
    prefix = f"{model.base_model_prefix}."
    own |= {prefix + name for name in own} | {name.removeprefix(prefix) for name in own}
    mixtures = [(name, m) for name, m in model.named_modules() if own and is_experts(m)]
    for name, module in mixtures:
        weights = list(experts.weights_of(module))
        stored = [leaf for leaf, _ in weights if f"{name}.{experts.PREFIX}{leaf}" in own]
        if stored and len(stored) < len(weights):
            raise CheckpointError(f"{name}: expected all weights in FP8, got {stored[0]} alone")
        for leaf, weight in weights if stored else ():
            num_experts, rows, columns = weight.shape
            shape = (num_experts, rows, columns)
            if getattr(module, "is_transposed", False):
                shape = (num_experts, columns, rows)
            experts.put_(module, leaf, _empty(Fp8ExpertLinear(shape, settings, device="meta")))
        if stored:  # some models draw the weights of experts with the module around them
            experts.keep_(model.get_submodule(name.rpartition(".")[0]))


def settle(
    layer: Fp8ExpertLinear, name: str, settings: LinearSettings, stored: StoredLinear
) -> None:
    """Give a layer its name and its own settings, now that they are known."""
    shape = (layer.num_experts, layer.out_features, layer.in_features)
    if stored.weight.shape != shape:
        raise CheckpointError(
            f"{name}: expected a weight {list(shape)}, got {list(stored.weight.shape)}"
        )
    layer.__init__(shape, settings, device="meta", name=name)  # type: ignore[misc]
    _empty(layer)


def _empty(layer: Fp8ExpertLinear) -> Fp8ExpertLinear:
    # No scales, or the loader would look for them in the files, and cast them.
    layer.weight_scale = layer.input_scale = None  # type: ignore[assignment]
    return layer

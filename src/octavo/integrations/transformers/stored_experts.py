"""Mixtures of experts that a checkpoint has in FP8, put where the model has plain ones."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.linear_layers import StoredLinear, check_finite
from octavo.integrations.checkpoints.tensor_files import TensorEntry
from octavo.integrations.linear import is_experts
from octavo.integrations.transformers import experts
from octavo.integrations.transformers.tensor_names import NamesInModel
from octavo.layers.experts import Fp8ExpertLinear
from octavo.numerics.granularity import PerBlock
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


@dataclass(frozen=True)
class StoredExperts:
    """One weight of a mixture, which a checkpoint has expert by expert: layers of each part.

    name: of the weight in the model. A part is the gate, or what it is multiplied with.
    """

    name: str
    parts: tuple[tuple[str, ...], ...]

    @property
    def layers(self) -> list[str]:
        """All layers of the checkpoint that the weight is made of."""
        return [layer for part in self.parts for layer in part]


def gather(model: nn.Module, found: Iterable[str], names: NamesInModel) -> list[StoredExperts]:
    """The layers of a checkpoint that transformers makes weights of mixtures of.

    CheckpointError for mixtures of which some experts are missing, or are not put together by
    stacking experts and joining their parts.
    """
    mixtures = {name for name, module in model.named_modules() if is_experts(module)}
    groups: dict[str, list[list[str]]] = {}
    for layer in found:
        target, part, num_parts = names.merged(layer)
        mixture, _, leaf = target.rpartition(".")
        if part is not None and mixture in mixtures and leaf in experts.WEIGHTS:
            groups.setdefault(target, [[] for _ in range(num_parts)])[part].append(layer)
    stored = []
    for target, parts in groups.items():
        mixture, _, leaf = target.rpartition(".")
        module: Any = model.get_submodule(mixture)
        num_experts = getattr(module, leaf).shape[0]
        if any(len(part) != num_experts for part in parts) or module.is_transposed:
            counts = ", ".join(str(len(part)) for part in parts)
            raise CheckpointError(f"{target}: expected {num_experts} experts in FP8, got {counts}")
        if missing := [x for x, _ in experts.weights_of(module) if f"{mixture}.{x}" not in groups]:
            raise CheckpointError(f"{mixture}: expected {missing[0]} in FP8 as well, got it plain")
        ordered = (tuple(sorted(part, key=_by_number)) for part in parts)
        stored.append(StoredExperts(target, tuple(ordered)))
    return stored


def make_room(
    model: nn.Module,
    stored: StoredExperts,
    settings: LinearSettings,
    read: Callable[[str], StoredLinear],
) -> Fp8ExpertLinear:
    """A layer with the scales of a mixture's weight, for which the model gets room in FP8.

    read: the layer of a checkpoint by name.
    """
    mixture, _, leaf = stored.name.rpartition(".")
    module: Any = model.get_submodule(mixture)
    num_experts, num_outputs, depth = getattr(module, leaf).shape
    rows = num_outputs // len(stored.parts)
    made = Fp8ExpertLinear(
        (num_experts, num_outputs, depth), settings, device="meta", name=stored.name
    )
    height = made.granularity.rows if isinstance(made.granularity, PerBlock) else 1
    if rows % height and rows < num_outputs:
        raise CheckpointError(
            f"{stored.name}: expected parts of whole blocks of {height} outputs, got {rows}"
        )
    scales, inputs = [], []
    for part in stored.parts:
        layers = [read(layer) for layer in part]
        for name, layer in zip(part, layers, strict=True):
            if layer.weight.shape != (rows, depth) or layer.shards is not None:
                got = list(layer.weight.shape)
                raise CheckpointError(f"{name}: expected a weight {[rows, depth]}, got {got}")
        scale = torch.stack([layer.weight_scale for layer in layers])
        scales.append(scale.unsqueeze(1).expand(-1, rows) if scale.dim() == 1 else scale)
        inputs += [layer.input_scale for layer in layers if layer.input_scale is not None]
    tensors = {"weight_scale": torch.cat(scales, dim=1).contiguous()}
    if inputs:  # a token has one scale for all its experts: the largest holds for all
        tensors["input_scale"] = torch.stack(inputs).amax()
    made.take_(tensors)
    fp8 = torch.empty_like(getattr(module, leaf), dtype=made.weight.dtype, device="meta")
    setattr(module, leaf, nn.Parameter(fp8, requires_grad=False))
    return made


def finish(model: nn.Module, layer: Fp8ExpertLinear) -> None:
    """Put a layer with the scales in place of its weight, which is there by now."""
    mixture, _, leaf = layer.name.rpartition(".")
    module: Any = model.get_submodule(mixture)
    weight = getattr(module, leaf).detach()
    scales = {n: x.to(weight.device) for n, x in layer.named_buffers() if n != "weight"}
    layer.take_({"weight": weight, **scales})
    check_finite(layer.name, weight)
    experts.put_(module, leaf, layer)


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


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts names as their numbers count: 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]

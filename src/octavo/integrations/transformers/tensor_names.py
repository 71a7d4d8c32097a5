"""What a model of transformers calls the tensors of a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.linear import layer_index
from octavo.internals import internals
from octavo.patterns import Layer, match_layers

with internals("transformers"):
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )


class NamesInModel:
    """What a model calls the tensors of a checkpoint."""

    def __init__(self, model: Any) -> None:
        self.model = model
        mapping = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.tensors = model.state_dict()

    def layer(self, layer: str) -> str | None:
        """The model's name of a layer with a weight, None if it has no such layer."""
        own = f"{layer}.weight"
        name, pattern = self._rename(own)
        if name not in self.tensors and own in self.tensors:
            return layer
        if pattern is not None:
            kind = type(self.model).__name__
            raise CheckpointError(
                f"{layer}: expected one linear layer of {kind}, got one that transformers makes "
                f"{name} of"
            )
        return name.removesuffix(".weight") if name in self.tensors else None

    def tensor(self, name: str) -> str:
        """What a report calls a tensor that the model may not have."""
        return self._rename(name)[0]

    def merged(self, layer: str) -> tuple[str, int | None, int]:
        """The tensor that a layer is put into; which part of it, and of how many.

        No part if it is its own tensor, or is not only stacked and joined with others.
        """
        target, pattern = self._rename(f"{layer}.weight")
        for converter in self.converters if pattern is not None else ():
            kinds = [type(step).__name__ for step in converter.operations]
            patterns = converter.source_patterns
            is_simple = kinds in (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
            if pattern in patterns and is_simple:
                return target, patterns.index(pattern), len(patterns)
        return target, None, 1

    def _rename(self, name: str) -> tuple[str, str | None]:
        prefix = self.model.base_model_prefix
        found: tuple[str, str | None] = rename_source_key(
            name, self.renamings, self.converters, prefix, self.tensors
        )
        return found


def stored_weight_only(patterns: Sequence[str], places: Mapping[str, str | None]) -> set[str]:
    """Which layers of a checkpoint are weight-only; places: their names in the model.

    A pattern may be for either name: a part of the model may be loaded, or what holds it.
    """
    names = {name: layer for layer, place in places.items() for name in (layer, place) if name}
    try:
        found = match_layers(patterns, [Layer(name, layer_index(name)) for name in names])
    except ConfigError as error:
        raise CheckpointError(f"weight_only_layers of the saved config: {error}") from None
    return {names[layer.name] for layer in found}

"""A recipe applied to a model for as long as something is measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo.integrations.apply import apply_, restore_
from octavo.integrations.linear_twin import quantized_twin, split_linear
from octavo.recipe import Recipe


@contextmanager
def applied(model: Any, recipe: Recipe | None) -> Iterator[Any]:
    """The model as a recipe has it; afterwards `model` is as it was.

    FP8 linear layers cannot be undone: with such a recipe it is a twin that shares all else.
    """
    if recipe is None:
        yield model
        return
    linear, rest = split_linear(recipe)
    if linear is not None:
        model, _ = quantized_twin(model, linear)
    if linear is None or rest.settings():
        apply_(model, rest)
    try:
        yield model
    finally:
        if linear is None:  # nobody else has a twin
            restore_(model)

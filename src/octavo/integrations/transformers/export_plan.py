"""Which linear layers of a checkpoint folder are exported in FP8, by its config alone."""

from pathlib import Path

from octavo.errors import ConfigError
from octavo.integrations.checkpoints.export_linear import open_plain
from octavo.integrations.linear import LinearPlan, plan_linear
from octavo.integrations.transformers.cache_layers import empty_model
from octavo.integrations.transformers.load import load_config, loading
from octavo.patterns import match_layers
from octavo.recipe import Recipe


def plan_export(source: Path, recipe: Recipe) -> LinearPlan:
    """The layers that a recipe quantizes in the model of a folder, and those that stay.

    Raises CheckpointError if the folder has no plain checkpoint of a language model, ConfigError if
    the recipe quantizes anything but linear layers.
    """
    if recipe.linear is None or (others := sorted(recipe.settings().keys() - {"linear"})):
        got = "none" if recipe.linear is None else f"{', '.join(others)} too"
        raise ConfigError(
            f"expected a recipe for linear layers alone, got {got}: scales of the KV cache are "
            "exported with --scales, and attention is quantized where the model runs"
        )
    open_plain(source)  # before transformers looks for another folder, or on the hub
    match_layers(recipe.included_layers, [])  # nothing stays by default that they could name
    config = load_config(str(source))
    with loading(source, "the config of a language model"):
        model = empty_model(config)
    return plan_linear(model, recipe.ignored_layers, weight_only_layers=recipe.weight_only_layers)

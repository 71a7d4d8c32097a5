"""One scale file for a pipeline of several models: its layers are named component.layer."""

from dataclasses import replace

from octavo.brief import list_names
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import CheckpointError


def of_component(scales: ScaleSet, component: str) -> ScaleSet:
    """The scales of one component, by the names that its layers have in it.

    CheckpointError if there are none, or if the scales are for something else than a pipeline.
    """
    scales.require_kind("pipeline")
    prefix = f"{component}."
    layers = {n.removeprefix(prefix): x for n, x in scales.layers.items() if n.startswith(prefix)}
    inputs = {n.removeprefix(prefix): x for n, x in scales.inputs.items() if n.startswith(prefix)}
    if not layers and not inputs:
        names = [*scales.layers, *scales.inputs]
        raise CheckpointError(
            f"expected scales of layers named {prefix}…, got {list_names(names)}: octavo calibrate "
            "--pipeline finds them"
        )
    incomplete = {
        n.removeprefix(prefix): x for n, x in scales.incomplete.items() if n.startswith(prefix)
    }
    header = replace(scales.header, kind=None)
    return ScaleSet(layers, header, inputs, incomplete=incomplete)

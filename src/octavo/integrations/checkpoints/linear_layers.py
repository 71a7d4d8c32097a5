"""The FP8 linear layers of a checkpoint: their weights by name, and their scales.

model.layers.0.mlp.up_proj.weight             F8_E4M3: this is what makes a layer FP8
model.layers.0.mlp.up_proj.weight_scale       one, one per output or one per block
model.layers.0.mlp.up_proj.weight_scale_inv   the same by its other name: no reciprocal
model.layers.0.mlp.up_proj.scale_weight       the same in ComfyUI's files
model.layers.0.mlp.up_proj.input_scale        static activations; also activation_scale, scale_input
model.layers.0.mlp.up_proj.weight_zero_point  zeros
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.kv_scales import parse_scale_name
from octavo.integrations.checkpoints.tensor_files import TensorEntry, check_zeros, read_scales
from octavo.integrations.fused_layers import part_sizes
from octavo.numerics.granularity import PerBlock, PerChannel, parse_granularity
from octavo.recipe import LinearSettings

FP8 = "F8_E4M3"
# What shares a scale in a weight, as LinearSettings has it.
Granularity = Literal["tensor", "channel", "block 128x128"]
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv", "scale_weight")
INPUT_SCALES = ("input_scale", "activation_scale", "scale_input")
ZERO_POINTS = ("weight_zero_point", "input_zero_point")
COMPANIONS = (*WEIGHT_SCALES, *INPUT_SCALES, *ZERO_POINTS)
# Other writers' parts of a quantized weight: whoever has one means something that we do not run.
_FOREIGN = re.compile(
    r"(?:weight|input|activation|output|pre_quant)_(?:global_)?scale\w*|scale_(?:weight|input)"
    r"|\w*_zero_point|\w*_?amax"
    r"|weight_(?:packed|shape|g_idx)|qweight|qzeros|g_idx|bitmask|\w*_quantizer"
)
# As safetensors calls them, or torch.
_WITHOUT_MEANING = re.compile(
    r"(?:F8_|F4|F6|I8|U8|I16|U16|I32|U32|BOOL|float[48]|u?int(?:8|16|32)|bool).*"
)


@dataclass(frozen=True)
class StoredLinear:
    """An FP8 layer as `Fp8Linear` takes it: scales in float32; shards: sizes of fused parts."""

    weight: TensorEntry
    weight_scale: Tensor
    input_scale: Tensor | None
    shards: tuple[int, ...] | None


def find_linear(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The weights of FP8 linear layers by layer; CheckpointError for quantized others.

    Scales of the KV cache are not looked at.
    """
    found = {
        name.removesuffix(".weight"): entry
        for name, entry in tensors.items()
        if name.endswith(".weight") and entry.dtype == FP8
    }
    strange = []
    for name, entry in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if (layer in found and leaf in (*COMPANIONS, "weight")) or parse_scale_name(name):
            continue
        if _FOREIGN.fullmatch(leaf) or _needs_scales(name, entry.dtype):
            strange.append(f"{name} ({entry.dtype})")
    if strange:
        raise CheckpointError(
            f"expected weights in {FP8} with scales, or plain ones without, got "
            f"{list_names(strange)}"
        )
    if not found:
        dtypes = sorted({e.dtype for n, e in tensors.items() if n.endswith(".weight")})
        raise CheckpointError(f"expected weights in {FP8}, got {', '.join(dtypes) or 'no weights'}")
    return found


def check_plain(dtypes: Mapping[str, str]) -> None:
    """Raise CheckpointError for weights, by name, in a dtype that means nothing without scales."""
    strange = [f"{name} ({dtype})" for name, dtype in dtypes.items() if _needs_scales(name, dtype)]
    if strange:
        raise CheckpointError(
            "expected weights in a plain dtype, as no config says how they are quantized, got "
            f"{list_names(strange)}: add the quantization_config that its writer used to "
            "config.json, or take the checkpoint in BF16"
        )


def find_scales(names: Iterable[str]) -> list[str]:
    """The names that are parts of a quantized weight: scales, zero points, packed numbers."""
    return [name for name in names if _FOREIGN.fullmatch(name.rpartition(".")[2])]


def _needs_scales(name: str, dtype: str) -> bool:
    is_weight = name.endswith((".weight", ".qweight")) or dtype.lower().startswith(("f8", "float8"))
    return is_weight and _WITHOUT_MEANING.fullmatch(dtype) is not None


def kv_scale_names(tensors: Iterable[str]) -> list[str]:
    """The scales of the KV cache among names of tensors, which kv_scales.py reads."""
    return [name for name in tensors if parse_scale_name(name)]


def read_linear(
    tensors: Mapping[str, TensorEntry],
    layer: str,
    settings: LinearSettings,
    text_config: Mapping[str, Any],
) -> StoredLinear:
    """One FP8 layer with its scales; CheckpointError if one is missing, or not what it must be.

    text_config: the language model's settings, whose heads say how a fused projection is cut.
    """
    weight = tensors[f"{layer}.weight"]
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise CheckpointError(f"{layer}: expected a weight [out, in], got {list(weight.shape)}")
    for name in ZERO_POINTS:
        if (entry := tensors.get(f"{layer}.{name}")) is not None:
            check_zeros(entry)
    entry = _only(tensors, layer, WEIGHT_SCALES)
    if entry is None:
        raise CheckpointError(f"{layer}: expected weight_scale for its FP8 weight, got none")
    shape, shards = _scale_shape(layer, weight.shape, entry, settings, text_config)
    scale = read_scales(entry).to(torch.float32)
    input_entry = _only(tensors, layer, INPUT_SCALES)
    is_static = settings.scaling == "static"
    if is_static != (input_entry is not None):
        got = "none" if input_entry is None else brief(input_entry.name)
        raise CheckpointError(
            f"{layer}: expected {'an' if is_static else 'no'} input_scale, as its config says "
            f"that activations are {settings.scaling}, got {got}"
        )
    input_scale = None
    if input_entry is not None:
        num_parts = 1 if shards is None else len(shards)
        if input_entry.num_elements != 1 and input_entry.shape != (num_parts,):
            raise CheckpointError(
                f"{brief(input_entry.name)}: expected one scale, got shape "
                f"{list(input_entry.shape)}"
            )
        # A fused projection has one input: the largest scale of its parts holds for all.
        input_scale = read_scales(input_entry).to(torch.float32).amax()
    return StoredLinear(weight, scale.reshape(shape), input_scale, shards)


def check_finite(layer: str, weight: Tensor) -> None:
    """Raise CheckpointError for NaN in an FP8 weight."""
    # In e4m3 all bits but the sign mean NaN, which torch does not look for in FP8.
    if bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"{layer}: expected a finite weight, got NaN in it")


def infer_linear_scheme(tensors: Mapping[str, TensorEntry]) -> LinearSettings:
    """How FP8 layers are quantized, by the shapes of their scales: what no config says.

    CheckpointError if the layers differ, or have no scales.
    """
    found: dict[tuple[Granularity, bool], str] = {}
    for layer, weight in find_linear(tensors).items():
        scale = _only(tensors, layer, WEIGHT_SCALES)
        if scale is None:
            raise CheckpointError(
                f"{layer}: expected a scale for its FP8 weight, as no config says how it is "
                "quantized, got none"
            )
        is_static = _only(tensors, layer, INPUT_SCALES) is not None
        found.setdefault((_granularity_of(weight, scale), is_static), layer)
    if len(found) > 1:
        told = "; ".join(
            f"{layer} per {granularity} with {'an' if is_static else 'no'} input scale"
            for (granularity, is_static), layer in found.items()
        )
        raise CheckpointError(f"expected one scheme for all layers, got {told}")
    ((granularity, is_static),) = found
    return LinearSettings(weight=granularity, scaling="static" if is_static else "dynamic")


def _granularity_of(weight: TensorEntry, scale: TensorEntry) -> Granularity:
    """What shares a scale in a weight, by the scale's shape."""
    choices: tuple[Granularity, ...] = ("tensor", "channel", "block 128x128")
    shapes = {one: parse_granularity(one).scale_shape(weight.shape) for one in choices}
    for granularity, shape in shapes.items():
        is_column = len(shape) < 2 and scale.shape == (*shape, 1)
        if scale.shape == shape or is_column:
            return granularity
    told = " or ".join(str(list(shape)) for shape in shapes.values())
    raise CheckpointError(
        f"{brief(scale.name)}: expected shape {told} for a weight {list(weight.shape)}, got "
        f"{list(scale.shape)}"
    )


def _only(
    tensors: Mapping[str, TensorEntry], layer: str, names: Sequence[str]
) -> TensorEntry | None:
    found = [tensors[f"{layer}.{name}"] for name in names if f"{layer}.{name}" in tensors]
    if len(found) > 1:
        told = " and ".join(entry.name.rpartition(".")[2] for entry in found)
        raise CheckpointError(f"{layer}: expected one scale, got both {told}")
    return found[0] if found else None


def _scale_shape(
    layer: str,
    shape: tuple[int, ...],
    entry: TensorEntry,
    settings: LinearSettings,
    text_config: Mapping[str, Any],
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape of a layer's weight_scale here, whatever 1 it was stored with, and its shards."""
    granularity = parse_granularity(settings.weight)
    wanted = granularity.scale_shape(shape)
    shards = None
    stored: list[tuple[int, ...]]
    match granularity:
        case PerBlock():
            stored = [wanted]
        case PerChannel():
            stored = [wanted, (*wanted, 1)]
        case _:
            stored = [(), (1,)]
            sizes = part_sizes(layer, shape[0], text_config)
            if sizes and entry.shape in ((len(sizes),), (len(sizes), 1)):
                wanted, shards = (len(sizes),), sizes
                stored = [entry.shape]
    if entry.shape not in stored:
        choices = " or ".join(str(list(choice)) for choice in stored)
        raise CheckpointError(
            f"{brief(entry.name)}: expected shape {choices} for a weight {list(shape)} per "
            f"{settings.weight}, got {list(entry.shape)}"
        )
    return wanted, shards

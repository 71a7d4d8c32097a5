"""The FP8 linear layers of a checkpoint: their weights by name, and their scales.

model.layers.0.mlp.up_proj.weight             F8_E4M3: this is what makes a layer FP8
model.layers.0.mlp.up_proj.weight_scale       one, one per output or one per block
model.layers.0.mlp.up_proj.weight_scale_inv   the same by its other name: no reciprocal
model.layers.0.mlp.up_proj.input_scale        static activations; also activation_scale
model.layers.0.mlp.up_proj.weight_zero_point  zeros
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALES = ("input_scale", "activation_scale")
ZERO_POINTS = ("weight_zero_point", "input_zero_point")
COMPANIONS = (*WEIGHT_SCALES, *INPUT_SCALES, *ZERO_POINTS)
# Other writers' parts of a quantized weight: whoever has one means something that we do not run.
_FOREIGN = re.compile(
    r"(?:weight|input|activation|output|pre_quant)_(?:global_)?scale\w*|\w*_zero_point|\w*_?amax"
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


def _only(
    tensors: Mapping[str, TensorEntry], layer: str, names: Sequence[str]
) -> TensorEntry | None:
    found = [tensors[f"{layer}.{name}"] for name in names if f"{layer}.{name}" in tensors]
    if len(found) > 1:
        raise CheckpointError(f"{layer}: expected one of {' and '.join(names)}, got both")
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

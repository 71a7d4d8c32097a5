"""One file with a diffusion transformer's FP8 weights, as ComfyUI and others write it.

double_blocks.0.img_attn.qkv.weight         F8_E4M3, by the names of the model's authors
double_blocks.0.img_attn.qkv.scale_weight   one, or one per output; newer files: weight_scale
double_blocks.0.img_attn.qkv.scale_input    static activations; newer files: input_scale
double_blocks.0.img_attn.qkv.comfy_quant    JSON as bytes: {"format": "float8_e4m3fn"}
scaled_fp8                                  a mark, not a weight

diffusers renames the tensors of such a file and cuts fused weights into their parts. Scales must
be cut in the same places: each row of a weight travels with its scales behind it, as bytes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError
from octavo.integrations.checkpoints import linear_layers
from octavo.integrations.checkpoints.tensor_files import read_headers
from octavo.integrations.diffusers.quantizer import (
    FILE_METHOD,
    OctavoDiffusersConfig,
    OctavoDiffusersQuantizer,
    QuantMethod,
)
from octavo.internals import internals, require
from octavo.layers.linear import Fp8Linear
from octavo.recipe import LinearSettings

with internals("diffusers"):
    from diffusers.quantizers import auto

require("diffusers.DiffusersQuantizer", "diffusers.quantizers.auto")

# In front of the transformer's names, where a file has text encoders and a VAE as well.
PREFIX = "model.diffusion_model."
MARK = "scaled_fp8"
FORMAT = ".comfy_quant"
_FP8_FORMAT = "float8_e4m3fn"


def load_single_file(kind: Any, path: Path, **options: Any) -> nn.Module:
    """A model of diffusers from one safetensors file in FP8; options: those of from_single_file."""
    tensors = _transformer_tensors(load_file(path))
    _check_formats(tensors)
    entries = {name: entry for name, entry in read_headers([path]).items() if name in tensors}
    settings = linear_layers.infer_linear_scheme(entries)
    if settings.weight not in ("tensor", "channel"):
        raise CheckpointError(
            f"{path.name}: expected one scale per tensor or per channel, got {settings.weight}: a "
            "folder of diffusers can have blocks"
        )
    for layer in linear_layers.find_linear(entries):
        stored = linear_layers.read_linear(entries, layer, settings, {})
        scales = [stored.weight_scale]
        scales += [] if stored.input_scale is None else [stored.input_scale]
        tensors[f"{layer}.weight"] = pack_rows(tensors[f"{layer}.weight"], *scales)
    for name in [n for n in tensors if n.rpartition(".")[2] in linear_layers.COMPANIONS]:
        del tensors[name]
    config, names = FileConfig(settings, tensors), list_names(sorted(tensors))
    try:
        model: nn.Module = kind.from_single_file(tensors, quantization_config=config, **options)
    except (IndexError, KeyError, RuntimeError) as error:  # of diffusers' conversion
        raise CheckpointError(
            f"{path.name}: expected the tensors of {kind.__name__}, by diffusers' names or by its "
            f"authors', got {names} ({type(error).__name__}: {brief(str(error))})"
        ) from error
    return model


def _transformer_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the transformer, without the mark that some writers leave."""
    own = {name: x for name, x in tensors.items() if name.startswith(PREFIX)} or tensors
    return {name: x for name, x in own.items() if name.removeprefix(PREFIX) != MARK}


def _check_formats(tensors: dict[str, Tensor]) -> None:
    """Take out what says how a layer is quantized; CheckpointError if that is not e4m3."""
    for name in [name for name in tensors if name.endswith(FORMAT)]:
        try:
            said = json.loads(bytes(tensors.pop(name).tolist()))
        except (ValueError, TypeError):
            said = None
        if not isinstance(said, dict) or said.get("format") != _FP8_FORMAT:
            raise CheckpointError(f"{name}: expected the format {_FP8_FORMAT}, got {brief(said)}")


def pack_rows(weight: Tensor, *scales: Tensor) -> Tensor:
    """An FP8 weight [rows, K] and scales, [] or [rows] in float32, as bytes [rows, K + 4 · …]."""
    rows = [weight.view(torch.uint8)]
    for scale in scales:
        column = scale.reshape(-1, 1).expand(len(weight), 1).contiguous()
        rows.append(column.view(torch.uint8))
    return torch.cat(rows, dim=1)


def unpack_rows(packed: Tensor, num_scales: int) -> tuple[Tensor, list[Tensor]]:
    """The weight and the scales, one for each row, of `pack_rows`."""
    depth = packed.shape[1] - 4 * num_scales
    columns = packed[:, depth:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return packed[:, :depth].contiguous().view(torch.float8_e4m3fn), list(columns.unbind(1))


class FileConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What diffusers hands from `load_single_file` to the quantizer.

    tensors: of the file; diffusers' conversion takes out what it knows.
    """

    def __init__(self, settings: LinearSettings, tensors: Mapping[str, Tensor]) -> None:
        self.quant_method, self.linear, self.tensors = QuantMethod.FILE, settings, tensors


class FileQuantizer(OctavoDiffusersQuantizer):
    """Gives a model the FP8 layers of one file, after diffusers has renamed and cut them."""

    quantization_config: Any

    def __init__(self, quantization_config: FileConfig, **kwargs: Any) -> None:
        super().__init__(OctavoDiffusersConfig(quantization_config.linear), pre_quantized=True)
        self.source = quantization_config.tensors
        is_static = quantization_config.linear.scaling == "static"
        self.leaves = ("weight_scale", "input_scale") if is_static else ("weight_scale",)

    def maybe_update_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Nothing is to be changed: the rows have their scales."""
        return state_dict

    def _process_model_before_weight_loading(
        self, model: nn.Module, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        assert state_dict is not None
        own = model.state_dict()
        left = [] if self.source is state_dict else [*self.source]
        if unknown := [*left, *(name for name in state_dict if name not in own)]:
            raise CheckpointError(
                f"expected tensors of {type(model).__name__}, got {list_names(unknown)}"
            )
        if missing := [name for name in own if name not in state_dict]:
            raise CheckpointError(
                f"expected all of the model's weights, got none for {list_names(missing)}"
            )
        packed = {
            name.removesuffix(".weight"): x
            for name, x in state_dict.items()
            if x.dtype == torch.uint8
        }
        for name, x in packed.items():
            part = model.get_submodule(name)
            if type(part) is not nn.Linear:
                kind = type(part).__name__
                raise CheckpointError(
                    f"{name}: expected FP8 weights of linear layers, got {kind}'s"
                )
            found = [x.shape[0], x.shape[1] - 4 * len(self.leaves)]
            if found != (wanted := list(part.weight.shape)):
                raise CheckpointError(f"{name}: expected a weight {wanted}, got {found}")
        self._place(model, dict.fromkeys(packed, self.quantization_config.linear))

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Give an FP8 layer its bias, or its weight with the scales of the rows."""
        owner, _, leaf = param_name.rpartition(".")
        layer = model.get_submodule(owner)
        assert isinstance(layer, Fp8Linear)
        if leaf != "weight":
            layer.take_({leaf: param_value.to(target_device)})
            return
        weight, scales = unpack_rows(param_value, len(self.leaves))
        linear_layers.check_finite(owner, weight)
        tensors = {"weight": weight.to(target_device)}
        for name, rows in zip(self.leaves, scales, strict=True):
            is_one = name == "input_scale" or layer.settings.weight == "tensor"
            if is_one and not bool((rows == rows[0]).all()):
                raise CheckpointError(
                    f"{owner}: expected one {name}, got several: diffusers makes the layer of "
                    "weights that have their own"
                )
            tensors[name] = (rows[0] if is_one else rows).to(target_device)
        layer.take_(tensors)


auto.AUTO_QUANTIZER_MAPPING[FILE_METHOD] = FileQuantizer

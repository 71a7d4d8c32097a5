"""FP8 linear layers through transformers' from_pretrained and save_pretrained.

Layers are replaced while the model is on the meta device. A plain weight is quantized as soon as it
streams in, so that no second one is there. Weights in FP8 come as they are; their scales are read
here, since transformers would cast them, and are put in place at the end.
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from octavo.brief import brief
from octavo.calibration.scale_file import ScaleSet, load_scales
from octavo.errors import CheckpointError, ConfigError, OctavoError, UnsupportedError
from octavo.integrations.checkpoints import linear_layers
from octavo.integrations.checkpoints.tensor_files import FLOAT_DTYPES, TensorEntry, read_headers
from octavo.integrations.fused_layers import shards_of
from octavo.integrations.linear import layer_index, plan_linear, put_linear_
from octavo.integrations.transformers.joint_projections import join_projections_
from octavo.internals import internals, require
from octavo.layers.linear import WITHOUT_FP8, Fp8Linear
from octavo.ops.check import check_fp8_device
from octavo.patterns import Layer, match_layers, parse_pattern
from octavo.recipe import LinearSettings

METHOD = "octavo"
__all__ = ["OctavoConfig", "OctavoQuantizer"]


@register_quantization_config(METHOD)
class OctavoConfig(QuantizationConfigMixin):
    """FP8 linear layers, for `from_pretrained(…, quantization_config=OctavoConfig(…))`.

    linear: "fp8" or the settings that `Recipe.linear` has. ignored_layers, weight_only_layers:
    patterns of layers to leave, and of those whose weight alone is quantized. scales: for static
    activations, a scale file's path or content; a saved model has them in its weights.
    """

    quant_method = METHOD

    def __init__(
        self,
        linear: str | Mapping[str, Any] | LinearSettings = "fp8",
        ignored_layers: Sequence[str] = (),
        scales: str | os.PathLike[str] | Mapping[str, Any] | ScaleSet | None = None,
        *,
        weight_only_layers: Sequence[str] = (),
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ConfigError(f"expected quant_method {METHOD}, got {brief(quant_method)}")
        settings = LinearSettings.read(linear)
        if settings is None:
            raise ConfigError(f"expected 'fp8' or settings of linear layers, got {brief(linear)}")
        if scales is not None and settings.scaling != "static":
            raise ConfigError("scales are given, but scaling is not 'static'; set it")
        self.linear = settings
        self.ignored_layers = _read_patterns(ignored_layers)
        self.weight_only_layers = _read_patterns(weight_only_layers)
        self.scales = scales

    def read_scales(self) -> ScaleSet | None:
        """The scales of static activations, from their file if it is one."""
        scales = self.scales
        if scales is None or isinstance(scales, ScaleSet):
            return scales
        if isinstance(scales, Mapping):
            return ScaleSet.from_dict(scales)
        return load_scales(scales)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON has it; scales only until a model has them in its weights."""
        document: dict[str, Any] = {"quant_method": METHOD, "linear": self.linear.model_dump()}
        document["ignored_layers"] = list(self.ignored_layers)
        if self.weight_only_layers:  # an octavo that does not know them can read the others
            document["weight_only_layers"] = list(self.weight_only_layers)
        if isinstance(self.scales, str | os.PathLike):
            document["scales"] = os.fsdecode(self.scales)
        elif (found := self.read_scales()) is not None:
            document["scales"] = found.to_dict()
        return copy.deepcopy(document)

    def __iter__(self) -> Any:
        return iter(self.to_dict().items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OctavoConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


def _read_patterns(texts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(texts, str):
        raise ConfigError(f"expected a list of patterns, got {brief(texts)}")
    return tuple(parse_pattern(text).text for text in texts)


with internals("transformers"):
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        ConversionOps,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

require(
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected",
    "transformers.quantizers.base.HfQuantizer",
)


@register_quantizer(METHOD)
class OctavoQuantizer(HfQuantizer):
    """What transformers calls while it loads a model whose linear layers are to be FP8."""

    quantization_config: OctavoConfig
    pre_quantized: bool
    is_trainable = False
    is_compileable = True

    def __init__(self, quantization_config: OctavoConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.input_scales: dict[str, float] = {}
        self.stored: dict[str, linear_layers.StoredLinear] = {}
        self.unfilled: set[str] = set()
        self.problems: list[str] = []

    def is_serializable(self) -> bool:
        """Weights and scales are plain tensors."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise for what cannot be loaded, before anything is."""
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise UnsupportedError(
                "expected FP8 linear layers on devices, got a device_map with disk: leave it out"
            )
        if self.pre_quantized:
            return
        config = self.quantization_config
        if config.linear.scaling == "static" and config.scales is None:
            raise ConfigError(
                "scaling 'static' needs scales, got none: OctavoConfig(…, scales=…), as "
                "calibrate_linear finds them"
            )

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor of the checkpoint is a plain weight for an FP8 layer."""
        layer, _, leaf = param_name.rpartition(".")
        is_ours = leaf == "weight" and isinstance(model.get_submodule(layer), Fp8Linear)
        return is_ours and not self.pre_quantized

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        """How many bytes a number of a tensor will take: device maps are made with it."""
        is_quantized = self.param_needs_quantization(model, param_name)
        return 1 if is_quantized else param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        """What quantizes a weight on its way into the model."""
        return _QuantizeWeight(self)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        paths = [Path(file) for file in checkpoint_files or ()]
        tensors = read_headers(path for path in paths if path.suffix == ".safetensors")
        if self.pre_quantized:
            self._place_stored(model, tensors)
        else:
            self._place_empty(model, tensors)

    def _place_empty(self, model: Any, tensors: Mapping[str, TensorEntry]) -> None:
        """Put FP8 layers without weights where plain ones were, for weights to be quantized."""
        for name, entry in tensors.items():
            is_weight = name.endswith(".weight") or entry.dtype.startswith("F8")
            if is_weight and entry.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"expected plain weights to quantize, got {name} in {entry.dtype}: "
                    "octavo.load_fp8 loads a checkpoint in FP8"
                )
        config = self.quantization_config
        patterns = config.weight_only_layers
        plan = plan_linear(model, config.ignored_layers, weight_only_layers=patterns)
        if (scales := config.read_scales()) is not None:
            scales.require_kind("linear")
            scales.require_inputs(plan.with_inputs())
            self.input_scales = dict(scales.inputs)
        for name, places in plan.chosen.items():
            plain = model.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            settings = plan.settings_of(name, config.linear)
            made = _empty(name, plain, settings, shards_of(model, name, plain, settings))
            # The loader casts a weight to the dtype that it finds here: to FP8 without a scale.
            made.weight = torch.empty_like(plain.weight.detach(), device="meta")
            put_linear_(model, places, made)
            self.unfilled.add(name)

    def _place_stored(self, model: Any, tensors: Mapping[str, TensorEntry]) -> None:
        """Put FP8 layers where the checkpoint has FP8 weights; all that is wrong is found here."""
        if not tensors:
            raise CheckpointError("expected FP8 weights in safetensors files, got none")
        config = self.quantization_config
        text_config = model.config.get_text_config().to_dict()
        names = _NamesInModel(model)
        places = {layer: names.layer(layer) for layer in linear_layers.find_linear(tensors)}
        weight_only = _stored_weight_only(config.weight_only_layers, places)
        for layer, place in places.items():
            if place is None:  # the report of unexpected keys has it
                continue
            plain = model.get_submodule(place)
            settings = config.linear.weight_only() if layer in weight_only else config.linear
            stored = linear_layers.read_linear(tensors, layer, settings, text_config)
            _check_place(model, place, plain, stored.weight)
            assert isinstance(plain, nn.Linear)
            self.stored[place] = stored
            put_linear_(model, (place,), _empty(place, plain, settings, stored.shards))
        read = [rf"\.(?:{'|'.join(linear_layers.COMPANIONS)})$"]
        if brought := linear_layers.kv_scale_names(tensors):
            both = dict.fromkeys([*brought, *map(names.tensor, brought)])
            read.append("(?:" + "|".join(map(re.escape, both)) + ")$")
        ignored: set[str] = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | set(read)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.problems:
            raise CheckpointError("; ".join(self.problems[:5]))
        layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
        for name, module in layers.items():
            if module.weight.is_meta:
                raise UnsupportedError(f"{name}: expected a weight on a device, got it on disk")
            if module.activation is not None:
                check_fp8_device(name, module.weight.device, None, instead=WITHOUT_FP8)
            try:
                if self.pre_quantized:
                    self._finish_stored(module, self.stored[name])
                elif name in self.unfilled:  # not in the files: transformers made it up
                    self.quantize_(module, module.weight)
                _finish_bias(module)
            except ConfigError as error:
                raise CheckpointError(str(error)) from None
        self.stored = {}
        # Static scales are in the layers now: what is saved needs none, and the caller's stays.
        config = self.quantization_config
        self.quantization_config = OctavoConfig(
            *(config.linear, config.ignored_layers), weight_only_layers=config.weight_only_layers
        )
        model.config.quantization_config = self.quantization_config
        join_projections_(model)
        return model

    def quantize_(self, module: Fp8Linear, weight: Tensor) -> None:
        """Fill an FP8 layer from its plain weight."""
        module.quantize_weight_(weight)
        self.unfilled.discard(module.name)
        if module.settings.scaling == "static":
            scale = self.input_scales[module.name]
            module.take_({"input_scale": torch.tensor(scale, device=weight.device)})

    def _finish_stored(self, module: Fp8Linear, stored: linear_layers.StoredLinear) -> None:
        weight = module.weight
        tensors = {"weight": weight, "weight_scale": stored.weight_scale.to(weight.device)}
        if stored.input_scale is not None:
            tensors["input_scale"] = stored.input_scale.to(weight.device)
        module.take_(tensors)
        # In e4m3 all bits but the sign mean NaN, which torch does not look for in FP8.
        if bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{module.name}: expected a finite weight, got NaN in it")


def _empty(
    name: str, plain: nn.Linear, settings: LinearSettings, shards: tuple[int, ...] | None
) -> Fp8Linear:
    """An FP8 layer without tensors in place of a plain one."""
    bias: Tensor | None = plain.bias
    made = Fp8Linear(
        plain.in_features,
        plain.out_features,
        settings,
        bias=bias is not None,
        dtype=plain.weight.dtype if bias is None else bias.dtype,
        device="meta",
        shards=shards,
        name=name,
    )
    # No tensors, or the loader would look for them in the files, and cast them.
    made.weight_scale = made.input_scale = None  # type: ignore[assignment]
    made.is_converted = True
    return made


def _stored_weight_only(patterns: Sequence[str], places: Mapping[str, str | None]) -> set[str]:
    """Which layers of a checkpoint are weight-only; places: their names in the model.

    A pattern may be for either name: a part of the model may be loaded, or what holds it.
    """
    names = {name: layer for layer, place in places.items() for name in (layer, place) if name}
    try:
        found = match_layers(patterns, [Layer(name, layer_index(name)) for name in names])
    except ConfigError as error:
        raise CheckpointError(f"weight_only_layers of the saved config: {error}") from None
    return {names[layer.name] for layer in found}


class _QuantizeWeight(ConversionOps):
    """Plain weights in, FP8 ones out; the layer gets its scales at once."""

    def __init__(self, quantizer: OctavoQuantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the loader puts into the model, by name."""
        out = {}
        for name, x in input_dict.items():
            weight = out[name] = x[0] if isinstance(x, list) else x
            module = kwargs["model"].get_submodule(name.rpartition(".")[0])
            if isinstance(module, Fp8Linear) and name.endswith(".weight"):
                try:
                    self.quantizer.quantize_(module, weight)
                    out[name] = module.weight
                except OctavoError as error:  # the loader would turn it into one of its own
                    self.quantizer.problems.append(str(error))
        return out


class _NamesInModel:
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

    def _rename(self, name: str) -> tuple[str, str | None]:
        prefix = self.model.base_model_prefix
        found: tuple[str, str | None] = rename_source_key(
            name, self.renamings, self.converters, prefix, self.tensors
        )
        return found


def _check_place(model: Any, name: str, plain: nn.Module, weight: TensorEntry) -> None:
    tied = model.all_tied_weights_keys
    if f"{name}.weight" in {*tied, *tied.values()}:
        raise CheckpointError(
            f"{name}: expected a plain weight for a layer that is tied to another, got "
            f"{linear_layers.FP8}"
        )
    if type(plain) is not nn.Linear:
        raise CheckpointError(
            f"{name}: expected FP8 weights of linear layers, got one of {type(plain).__name__}"
        )
    if tuple(plain.weight.shape) != weight.shape:
        raise CheckpointError(
            f"{name}: expected a weight {list(plain.weight.shape)}, got {list(weight.shape)}"
        )


def _finish_bias(module: Fp8Linear) -> None:
    bias: Tensor | None = module.bias
    if bias is not None and bias.shape[0] == module.weight.shape[0]:  # without padding, or made up
        bias.requires_grad_(False)
    elif bias is not None:
        module.take_({"bias": bias.detach()})

"""FP8 linear layers in diffusers' own loading and saving.

Importing this file adds octavo to diffusers' quantizers: they are two dictionaries.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import NVIDIAModelOptConfig, QuantizationConfigMixin
from torch import Tensor, nn

from octavo.brief import list_names
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.checkpoints import linear_layers
from octavo.integrations.checkpoints.scheme import read_linear_scheme
from octavo.integrations.checkpoints.tensor_files import TensorEntry, read_headers
from octavo.integrations.diffusers.linear import as_patterns_see, kept_layers, use_faster_forms_
from octavo.integrations.fused_layers import shards_of
from octavo.integrations.linear import plan_linear, put_linear_
from octavo.internals import internals, require
from octavo.layers.linear import Fp8Linear
from octavo.patterns import match_layers
from octavo.recipe import LinearSettings, Recipe

with internals("diffusers"):
    from diffusers.quantizers import auto

require(
    "diffusers.DiffusersQuantizer",
    "diffusers.ModelMixin._keys_to_ignore_on_load_unexpected",
    "diffusers.quantizers.auto",
)

QUANT_METHOD = "octavo"
FILE_METHOD = "octavo-file"  # while one is loaded by single_file.py; never in a config.json
# Other writers' words for formats that octavo reads; diffusers knows the first for another purpose.
FOREIGN_METHODS = ("modelopt", "compressed-tensors", "fp8")
_SCALES = (".weight_scale", ".input_scale")
_COMPANIONS = tuple(f".{name}" for name in linear_layers.COMPANIONS)


class QuantMethod(StrEnum):
    """What diffusers asks a config for: a string with a `value`."""

    OCTAVO = QUANT_METHOD
    FILE = FILE_METHOD


class OctavoDiffusersConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """FP8 linear layers for `from_pretrained(quantization_config=…)` of diffusers models.

    linear: "fp8" or settings, as in a recipe. ignored_layers: patterns of layers to leave;
    included_layers: those to quantize although the model's defaults leave them; weight_only_layers:
    those whose weight alone is quantized, "modulation" too; one that matches nothing is an error.
    Pipelines take it in PipelineQuantizationConfig(quant_mapping={…}).
    """

    # Whether the files have FP8 weights already, though their config.json may not say so.
    is_stored = False

    def __init__(
        self,
        linear: str | Mapping[str, Any] | LinearSettings = "fp8",
        ignored_layers: Sequence[str] = (),
        included_layers: Sequence[str] = (),
        quant_method: str = QUANT_METHOD,
        weight_only_layers: Sequence[str] = (),
    ) -> None:
        if quant_method != QUANT_METHOD:
            raise ConfigError(f"expected quant_method {QUANT_METHOD!r}, got {quant_method!r}")
        settings = LinearSettings.read(linear)
        if settings is None:
            raise ConfigError(f"expected 'fp8' or settings of linear layers, got {linear}")
        patterns = Recipe(
            linear="fp8",
            ignored_layers=ignored_layers,
            included_layers=included_layers,
            weight_only_layers=weight_only_layers,
        )
        self.quant_method, self.linear = QuantMethod.OCTAVO, settings
        self.ignored_layers = patterns.ignored_layers
        self.included_layers = patterns.included_layers
        self.weight_only_layers = patterns.weight_only_layers

    def to_dict(self) -> dict[str, Any]:
        """What a model's config.json has, and `from_dict` reads."""
        found = {
            "quant_method": QUANT_METHOD,
            "linear": dict(self.linear),
            "ignored_layers": list(self.ignored_layers),
            "included_layers": list(self.included_layers),
        }
        if self.weight_only_layers:  # an octavo that does not know them can read the others
            found["weight_only_layers"] = list(self.weight_only_layers)
        return found

    to_diff_dict = to_dict  # all of it is shown


class ForeignConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Reads the quantization_config of FP8 models that others wrote, as diffusers asks for it."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Octavo's config of the same meaning; CheckpointError if it has none.

        A config with quant_type is diffusers' own, which quantizes by ModelOpt's library.
        """
        if "quant_type" in config_dict:
            return NVIDIAModelOptConfig.from_dict(config_dict, **kwargs)
        return OctavoDiffusersConfig(read_linear_scheme({"quantization_config": config_dict}))


class OctavoDiffusersQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """Quantizes the weights of a diffusers model one by one, as its files are read.

    Of a model that was saved quantized, those layers are FP8 whose scales are in its files.
    """

    use_keep_in_fp32_modules = True
    is_serializable = is_compileable = True
    is_trainable = False  # FP8 layers have no backward pass
    quantization_config: OctavoDiffusersConfig

    def __init__(self, quantization_config: OctavoDiffusersConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized |= quantization_config.is_stored
        self._tensors: dict[str, TensorEntry] = {}
        self._stored: dict[str, linear_layers.StoredLinear] = {}
        self._fp8_names: frozenset[str] = frozenset()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Static scales are in no file of a plain model."""
        if not self.pre_quantized and self.quantization_config.linear.scaling == "static":
            raise ConfigError(
                "expected scaling 'dynamic' to quantize while loading, got 'static': load the "
                "model, then octavo.apply_ with scales"
            )

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """float32 unless given, as in diffusers, which would cast plain weights to FP8 without."""
        return torch.float32 if torch_dtype is None else torch_dtype

    def maybe_update_loaded_keys(
        self, loaded_keys: list[str], checkpoint_files: Sequence[str | Path]
    ) -> list[str]:
        """Read what the files have; diffusers gets octavo's names of scales, whoever wrote them."""
        if not self.pre_quantized:
            return loaded_keys
        if others := [
            str(file) for file in checkpoint_files if Path(file).suffix != ".safetensors"
        ]:
            raise CheckpointError(f"expected FP8 weights in safetensors, got {list_names(others)}")
        self._tensors = read_headers(map(Path, checkpoint_files))
        keys = [key for key in loaded_keys if not key.endswith(_COMPANIONS)]
        leaves = _SCALES if self.quantization_config.linear.scaling == "static" else _SCALES[:1]
        layers = linear_layers.find_linear(self._tensors)
        return keys + [layer + leaf for layer in layers for leaf in leaves]

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        layers = self._stored_layers(model) if self.pre_quantized else self._planned_layers(model)
        self._place(model, layers)
        if self.pre_quantized:
            self._check_names(model)

    def _place(self, model: nn.Module, layers: Mapping[str, LinearSettings]) -> None:
        """Put FP8 layers without weights where plain ones were."""
        for name, settings in layers.items():
            plain = model.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            stored = self._stored.get(name)
            made = Fp8Linear(
                plain.in_features,
                plain.out_features,
                settings,
                bias=plain.bias is not None,
                dtype=plain.weight.dtype,
                device=plain.weight.device,
                shards=stored.shards if stored else shards_of(model, name, plain, settings),
                name=name,
            )
            made.is_converted = True
            put_linear_(model, (name,), made)
        self._fp8_names = frozenset(layers)

    def _planned_layers(self, model: nn.Module) -> dict[str, LinearSettings]:
        """The layers of a plain model that are to be quantized."""
        config = self.quantization_config
        kept = kept_layers(model, config.included_layers)
        plan = plan_linear(model, config.ignored_layers, kept, config.weight_only_layers)
        return {name: plan.settings_of(name, config.linear) for name in plan.chosen}

    def _stored_layers(self, model: nn.Module) -> dict[str, LinearSettings]:
        """The layers that are FP8 in the files, whose scales are read here."""
        config, found = self.quantization_config, linear_layers.find_linear(self._tensors)
        linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
        if unknown := [name for name in found if name not in linears]:
            raise CheckpointError(
                f"expected FP8 weights of linear layers of {type(model).__name__}, got some of "
                f"{list_names(unknown)}"
            )
        for name, entry in found.items():
            if entry.shape != (shape := tuple(linears[name].weight.shape)):
                raise CheckpointError(
                    f"{name}: expected a weight {list(shape)}, got {list(entry.shape)}"
                )
        layers = [layer for layer in as_patterns_see(model) if layer.name in found]
        try:
            hits = {layer.name for layer in match_layers(config.weight_only_layers, layers)}
        except ConfigError as error:
            raise CheckpointError(f"weight_only_layers of the saved config: {error}") from None
        settings, alone = config.linear, config.linear.weight_only()
        chosen = {name: alone if name in hits else settings for name in found}
        self._stored = {
            name: linear_layers.read_linear(self._tensors, name, own, {})
            for name, own in chosen.items()
        }
        return chosen

    def _check_names(self, model: nn.Module) -> None:
        """Raise for tensors that the model does not have; diffusers would only warn."""
        own: Any = model
        patterns = own._keys_to_ignore_on_load_unexpected or ()
        found = {name for name in self._tensors if not name.endswith(_COMPANIONS)}
        unknown = [
            name
            for name in sorted(found - model.state_dict().keys())
            if not any(re.search(pattern, name) for pattern in patterns)
        ]
        if unknown:
            raise CheckpointError(
                f"expected tensors of {type(model).__name__}, got {list_names(unknown)}"
            )

    def maybe_update_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give diffusers the scales by octavo's names, beside their weights.

        It casts floating-point tensors to the model's dtype: scales come as integers.
        """
        if not self.pre_quantized:
            if scales := linear_layers.find_scales(state_dict):
                raise CheckpointError(
                    f"expected plain weights to quantize, got scales: {list_names(scales)}"
                )
            return state_dict
        found = {key: x for key, x in state_dict.items() if not key.endswith(_COMPANIONS)}
        for name, stored in self._stored.items():
            if f"{name}.weight" not in found:
                continue
            found[f"{name}.weight_scale"] = stored.weight_scale.view(torch.int32)
            if stored.input_scale is not None:
                found[f"{name}.input_scale"] = stored.input_scale.view(torch.int32)
        return found

    def update_missing_keys(
        self, model: nn.Module, missing_keys: list[str], prefix: str
    ) -> list[str]:
        """Scales of a plain model are made from its weights."""
        if self.pre_quantized:
            return missing_keys
        return [key for key in missing_keys if not key.endswith(".weight_scale")]

    def check_if_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        """Whether a tensor belongs to an FP8 layer, which takes its bias padded as well."""
        return param_name.rpartition(".")[0] in self._fp8_names

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Give an FP8 layer one of its tensors."""
        owner, _, leaf = param_name.rpartition(".")
        layer = model.get_submodule(owner)
        assert isinstance(layer, Fp8Linear)
        value = param_value.to(target_device)
        if leaf == "weight" and not self.pre_quantized:
            layer.quantize_weight_(value)
            return
        if leaf == "weight":
            linear_layers.check_finite(owner, value)
        if leaf.endswith("_scale"):
            value = value.view(torch.float32)
        layer.take_({leaf: value})

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        for name in sorted(self._fp8_names):
            layer = model.get_submodule(name)
            if absent := [key for key, x in layer.state_dict().items() if x.is_meta]:
                raise CheckpointError(
                    f"{name}: expected {', '.join(absent)} in the files, got none"
                )
        use_faster_forms_(model)
        _set_config(model, self.quantization_config)
        self.pre_quantized = True


def note_quantized_(model: nn.Module, recipe: Recipe) -> None:
    """Write into a model's config that octavo quantized it, so that it is saved and loaded so."""
    if not hasattr(model, "register_to_config"):
        return
    assert recipe.linear is not None
    config = OctavoDiffusersConfig(
        recipe.linear,
        recipe.ignored_layers,
        recipe.included_layers,
        weight_only_layers=recipe.weight_only_layers,
    )
    _set_config(model, config)
    model.hf_quantizer = OctavoDiffusersQuantizer(config, pre_quantized=True)


def _set_config(model: Any, config: OctavoDiffusersConfig) -> None:
    model.register_to_config(quantization_config=config)
    # Cosmos3's pipeline looks for an attribute; by diffusers' detour to the config it would warn.
    model.quantization_config = config


auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = OctavoDiffusersQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = OctavoDiffusersConfig
for _method in FOREIGN_METHODS:
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[_method] = ForeignConfig

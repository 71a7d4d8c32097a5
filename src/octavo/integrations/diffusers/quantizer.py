"""FP8 linear layers in diffusers' own loading and saving.

Importing this file adds octavo to diffusers' quantizers: they are two dictionaries.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import Tensor, nn

from octavo.brief import list_names
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.diffusers.linear import as_patterns_see, kept_layers, use_faster_forms_
from octavo.integrations.fused_layers import shards_of
from octavo.integrations.linear import plan_linear
from octavo.internals import internals, require
from octavo.layers.linear import Fp8Linear
from octavo.patterns import match_layers
from octavo.recipe import LinearSettings, Recipe

with internals("diffusers"):
    from diffusers.quantizers import auto

require("diffusers.DiffusersQuantizer", "diffusers.quantizers.auto")

QUANT_METHOD = "octavo"
_SCALES = (".weight_scale", ".input_scale")


class QuantMethod(StrEnum):
    """What diffusers asks a config for: a string with a `value`."""

    OCTAVO = QUANT_METHOD


class OctavoDiffusersConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """FP8 linear layers for `from_pretrained(quantization_config=…)` of diffusers models.

    linear: "fp8" or settings, as in a recipe. ignored_layers: patterns of layers to leave;
    included_layers: those to quantize although the model's defaults leave them; weight_only_layers:
    those whose weight alone is quantized, "modulation" too; one that matches nothing is an error.
    Pipelines take it in PipelineQuantizationConfig(quant_mapping={…}).
    """

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
        self._stored_scales: frozenset[str] = frozenset()
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
        self, loaded_keys: list[str], checkpoint_files: list[str]
    ) -> list[str]:
        """Take note of the layers that have scales."""
        self._stored_scales = frozenset(key for key in loaded_keys if key.endswith(_SCALES))
        return loaded_keys

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        config = self.quantization_config
        if self.pre_quantized:
            layers = self._stored_layers(model)
        else:
            kept = kept_layers(model, config.included_layers)
            plan = plan_linear(model, config.ignored_layers, kept, config.weight_only_layers)
            layers = {name: plan.settings_of(name, config.linear) for name in plan.chosen}
        for name, settings in layers.items():
            plain = model.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            made = Fp8Linear(
                plain.in_features,
                plain.out_features,
                settings,
                bias=plain.bias is not None,
                dtype=plain.weight.dtype,
                device=plain.weight.device,
                shards=shards_of(model, name, plain, settings),
                name=name,
            )
            made.is_converted = True
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, made)
        self._fp8_names = frozenset(layers)

    def _stored_layers(self, model: nn.Module) -> dict[str, LinearSettings]:
        config = self.quantization_config
        names = list(dict.fromkeys(key.rpartition(".")[0] for key in sorted(self._stored_scales)))
        if not names:
            raise CheckpointError(
                f"expected FP8 layers with weight_scale in {type(model).__name__}, whose config "
                "says that octavo quantized it; got none"
            )
        linears = {name for name, part in model.named_modules() if type(part) is nn.Linear}
        if unknown := [name for name in names if name not in linears]:
            raise CheckpointError(
                "expected scales of the model's own linear layers, got some of "
                f"{list_names(unknown)}"
            )
        layers = [layer for layer in as_patterns_see(model) if layer.name in names]
        try:
            hits = {layer.name for layer in match_layers(config.weight_only_layers, layers)}
        except ConfigError as error:
            raise CheckpointError(f"weight_only_layers of the saved config: {error}") from None
        settings, alone = config.linear, config.linear.weight_only()
        return {name: alone if name in hits else settings for name in names}

    def maybe_update_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Hide float32 scales from diffusers' cast to the model's dtype: as integers they stay."""
        for key, x in state_dict.items():
            owner, _, leaf = key.rpartition(".")
            has_scale = leaf == "weight" and f"{owner}.weight_scale" in self._stored_scales
            if x.dtype == torch.float8_e4m3fn and not has_scale:
                raise CheckpointError(f"{key}: expected a weight_scale beside FP8 data, got none")
            if key.endswith(_SCALES) and x.dtype != torch.float32:
                raise CheckpointError(f"{key}: expected float32, got {x.dtype}")
        return {
            key: x.contiguous().view(torch.int32) if key.endswith(_SCALES) else x
            for key, x in state_dict.items()
        }

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
        if leaf == "weight" and value.dtype != torch.float8_e4m3fn:
            if self.pre_quantized:
                raise CheckpointError(f"{param_name}: expected FP8 data, got {value.dtype}")
            layer.quantize_weight_(value)
            return
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

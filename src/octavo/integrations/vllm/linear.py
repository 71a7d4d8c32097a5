"""`--quantization octavo`: vLLM's linear layers in FP8, quantized as their weights are loaded."""

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from octavo.brief import list_names
from octavo.errors import UnsupportedError
from octavo.integrations.vllm.names import FP8, LOGGER, QUANTIZATION, warn_on_gpu
from octavo.integrations.vllm.settings import LinearChoice, read_settings
from octavo.layers.linear import WITHOUT_FP8, Fp8Linear
from octavo.ops.check import check_fp8_device
from octavo.recipe import LinearSettings


class OctavoLinearConfig(QuantizationConfig):
    """Which layers of a model are in FP8; experts and attention keep vLLM's own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.choice: LinearChoice | None = None
        self.experts: dict[str, None] = {}
        self._is_checked = False
        self._has_all_layers = True

    def get_name(self) -> str:
        """The word behind --quantization."""
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes that a model may have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of weight-only layers; others need 89, which each layer checks."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: settings come from --additional-config."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OctavoLinearConfig":
        """Refuse a checkpoint that octavo has quantized: the plug-in takes plain weights."""
        raise UnsupportedError(
            f"--quantization {QUANTIZATION} takes a checkpoint with plain weights, got one with a "
            f"quantization_config of {config.get('quant_method')!r}: give vLLM the model that it "
            "was made from"
        )

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """What makes and runs the weights of a layer; None leaves that to vLLM."""
        if isinstance(layer, Attention):
            # vLLM's method reads the scales of an e4m3 cache, where the checkpoint has any.
            return BaseKVCacheMethod(self) if layer.kv_cache_dtype in FP8 else None
        if isinstance(layer, RoutedExperts):
            self.experts[prefix] = None
        if not isinstance(layer, LinearBase):
            return None
        if self.choice is None:
            config = get_current_vllm_config()
            if config.lora_config is not None:
                raise UnsupportedError(
                    f"--quantization {QUANTIZATION} does not support LoRA: leave one of them out"
                )
            self.choice = LinearChoice(read_settings(config))
            # A stage of a pipeline has some of the layers: a pattern may match those of another.
            self._has_all_layers = config.parallel_config.pipeline_parallel_size == 1
        leaf = prefix.rpartition(".")[2]
        parts = self.packed_modules_mapping.get(leaf, ())
        settings = self.choice.choose(prefix, parts, (layer.input_size, layer.output_size))
        if settings is None:
            return UnquantizedLinearMethod()
        return OctavoLinearMethod(self, prefix, settings)

    def loaded(self) -> None:
        """Check the patterns and say what is in FP8, when all layers are known."""
        if self._is_checked or self.choice is None:
            return
        self._is_checked = True
        warn_on_gpu()
        logger, choice = init_logger(LOGGER), self.choice
        if self._has_all_layers:
            choice.check()
        left = [f"{name} ({reason})" for name, reason in choice.left.items()]
        logger.info(
            "octavo runs %d linear layers in FP8 (%s); left alone: %s",
            len(choice.settings),
            choice.given.linear,
            list_names(left) or "none",
        )
        if self.experts:
            names = list_names([*self.experts])
            logger.info("octavo leaves experts to vLLM, in their own dtype: %s", names)


@register_weight_loader_v2_supported_method
class OctavoLinearMethod(LinearMethodBase):
    """Loads plain weights as vLLM does, then puts an Fp8Linear in their place."""

    def __init__(self, config: OctavoLinearConfig, name: str, settings: LinearSettings) -> None:
        self.config, self.name, self.settings = config, name, settings
        self.plain = UnquantizedLinearMethod()
        self.shards: tuple[int, ...] = ()

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *sizes: Any,
        **attributes: Any,
    ) -> None:
        """Make room for the plain weight; its outputs are those of one or more projections."""
        self.shards = tuple(output_partition_sizes)
        self.plain.create_weights(
            layer, input_size_per_partition, output_partition_sizes, *sizes, **attributes
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight, and give the plain one up."""
        self.config.loaded()
        weight = layer.weight.data
        if self.settings.activation is not None:
            check_fp8_device(self.name, weight.device, None, instead=WITHOUT_FP8)
        made = Fp8Linear(
            weight.shape[1],
            weight.shape[0],
            self.settings,
            bias=False,
            dtype=weight.dtype,
            device=weight.device,
            shards=self.shards,
            name=self.name,
        )
        made.quantize_weight_(weight)
        layer.register_parameter("weight", None)
        layer.octavo_linear = made

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x · weightᵀ + bias."""
        out: Tensor = layer.octavo_linear(x)
        return out if bias is None else out + bias

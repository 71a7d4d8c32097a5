"""octavo: FP8 attention, KV cache and linear layers for PyTorch models.

Names are imported when they are first used: `import octavo` loads neither torch nor any optional
package, and touches no GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from octavo.extras import explain_missing
from octavo.version import __version__ as __version__

if TYPE_CHECKING:
    from octavo import ops as ops
    from octavo.cache.pages import PageAllocator as PageAllocator
    from octavo.cache.spec import CacheSpec as CacheSpec
    from octavo.cache.storage import PagedStorage as PagedStorage
    from octavo.cache.view import PagedView as PagedView
    from octavo.calibration.observers import CalibrationSettings as CalibrationSettings
    from octavo.calibration.scale_file import LayerScales as LayerScales
    from octavo.calibration.scale_file import ScaleSet as ScaleSet
    from octavo.calibration.scale_file import load_scales as load_scales
    from octavo.calibration.scale_file import save_scales as save_scales
    from octavo.errors import CapacityError as CapacityError
    from octavo.errors import CheckpointError as CheckpointError
    from octavo.errors import ConfigError as ConfigError
    from octavo.errors import OctavoError as OctavoError
    from octavo.errors import UnsupportedError as UnsupportedError
    from octavo.integrations.apply import apply_ as apply_
    from octavo.integrations.apply import quantize_ as quantize_
    from octavo.integrations.apply import restore_ as restore_
    from octavo.integrations.calibrate_linear import calibrate_linear as calibrate_linear
    from octavo.integrations.diffusers.calibrate import calibrate_pipeline as calibrate_pipeline
    from octavo.integrations.diffusers.sensitivity import Sensitivity as Sensitivity
    from octavo.integrations.diffusers.sensitivity import scan_sensitivity as scan_sensitivity
    from octavo.integrations.diffusers.step_cache import count_cached_steps as count_cached_steps
    from octavo.integrations.diffusers.step_cache import drop_step_cache_ as drop_step_cache_
    from octavo.integrations.diffusers.step_cache import fit_tea_cache as fit_tea_cache
    from octavo.integrations.diffusers.step_cache import use_step_cache_ as use_step_cache_
    from octavo.integrations.load_fp8 import load_fp8 as load_fp8
    from octavo.integrations.transformers.calibrate import calibrate as calibrate
    from octavo.integrations.transformers.calibrate import calibrate_kv as calibrate_kv
    from octavo.integrations.transformers.quantizer import OctavoConfig as OctavoConfig
    from octavo.layers.scaled_dot_product_attention import (
        ScaledDotProductAttention as ScaledDotProductAttention,
    )
    from octavo.layers.warmup import warmup as warmup
    from octavo.numerics.amax import AmaxHistory as AmaxHistory
    from octavo.numerics.attention import AttentionSpec as AttentionSpec
    from octavo.numerics.attention import Packing as Packing
    from octavo.numerics.formats import E4M3 as E4M3
    from octavo.numerics.formats import E5M2 as E5M2
    from octavo.numerics.granularity import PerBlock as PerBlock
    from octavo.numerics.granularity import PerChannel as PerChannel
    from octavo.numerics.granularity import PerHead as PerHead
    from octavo.numerics.granularity import PerTensor as PerTensor
    from octavo.numerics.granularity import PerToken as PerToken
    from octavo.numerics.qkv import QkvScales as QkvScales
    from octavo.numerics.qkv import QuantizedQkv as QuantizedQkv
    from octavo.numerics.quantize import Quantized as Quantized
    from octavo.ops.scaled_dot_product_attention import (
        scaled_dot_product_attention as scaled_dot_product_attention,
    )
    from octavo.recipe import Recipe as Recipe
    from octavo.serving.engine.image_request import ImageResult as ImageResult
    from octavo.serving.engine.image_request import ImageSampling as ImageSampling
    from octavo.serving.engine.llm import LLM as LLM
    from octavo.serving.engine.omni import Omni as Omni
    from octavo.serving.engine.request import Completion as Completion
    from octavo.serving.engine.request import Sampling as Sampling
    from octavo.serving.engine.settings import EngineSettings as EngineSettings

# Module -> its public names.
_NAMES = {
    "cache.pages": "PageAllocator",
    "cache.spec": "CacheSpec",
    "cache.storage": "PagedStorage",
    "cache.view": "PagedView",
    "calibration.observers": "CalibrationSettings",
    "calibration.scale_file": "LayerScales ScaleSet load_scales save_scales",
    "errors": "CapacityError CheckpointError ConfigError OctavoError UnsupportedError",
    "integrations.apply": "apply_ quantize_ restore_",
    "integrations.calibrate_linear": "calibrate_linear",
    "integrations.diffusers.calibrate": "calibrate_pipeline",
    "integrations.diffusers.sensitivity": "Sensitivity scan_sensitivity",
    "integrations.diffusers.step_cache": (
        "count_cached_steps drop_step_cache_ fit_tea_cache use_step_cache_"
    ),
    "integrations.transformers.calibrate": "calibrate calibrate_kv",
    "integrations.load_fp8": "load_fp8",
    "integrations.transformers.quantizer": "OctavoConfig",
    "layers.scaled_dot_product_attention": "ScaledDotProductAttention",
    "layers.warmup": "warmup",
    "numerics.amax": "AmaxHistory",
    "numerics.attention": "AttentionSpec Packing",
    "numerics.formats": "E4M3 E5M2",
    "numerics.granularity": "PerBlock PerChannel PerHead PerTensor PerToken",
    "numerics.qkv": "QkvScales QuantizedQkv",
    "numerics.quantize": "Quantized",
    "ops.scaled_dot_product_attention": "scaled_dot_product_attention",
    "recipe": "Recipe",
    "serving.engine.image_request": "ImageResult ImageSampling",
    "serving.engine.llm": "LLM",
    "serving.engine.omni": "Omni",
    "serving.engine.request": "Completion Sampling",
    "serving.engine.settings": "EngineSettings",
}
_HOME = {name: f"octavo.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", "ops", *_HOME])


def __getattr__(name: str) -> object:
    if name == "ops":
        return import_module("octavo.ops")
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if (message := explain_missing(f"octavo.{name}", error)) is None:
            raise
        raise ImportError(message) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

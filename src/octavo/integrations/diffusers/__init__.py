"""diffusers: importing it lets diffusers load and save models that octavo quantized.

Text encoders are models of transformers, whose quantizer is registered with it.
"""

from octavo.integrations.diffusers.quantizer import OctavoDiffusersConfig
from octavo.integrations.transformers.quantizer import OctavoConfig

__all__ = ["OctavoConfig", "OctavoDiffusersConfig"]

"""diffusers: importing it lets diffusers load and save models that octavo quantized."""

from octavo.integrations.diffusers.quantizer import OctavoDiffusersConfig

__all__ = ["OctavoDiffusersConfig"]

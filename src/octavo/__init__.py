"""octavo: FP8 attention, KV cache and linear layers for PyTorch models."""

from octavo.version import __version__

__all__ = ["__version__"]

"""Small image models with random weights that do something, in a folder."""

from pathlib import Path

import torch

from octavo.demo.small_image import (
    make_small_image_model,
    save_small_image_model,
)

WORDS = ["small", "cat", "dog", "on", "blue"]
TINY = {
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
}


def write_small_image(folder: Path) -> Path:
    """A tiny model whose blocks do something, unlike those of a new one; returns its folder."""
    made = make_small_image_model(WORDS, **TINY)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.transformer.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    save_small_image_model(made, folder)
    return folder

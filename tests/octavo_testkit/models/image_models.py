"""A small Qwen3-VL with its image processor, and images, as folders on disk."""

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

VISION = {
    "depth": 2,
    "hidden_size": 144,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
}
LAYERS = ["visual.blocks.0.attn.attn", "visual.blocks.1.attn.attn"]


def make_model():
    """Qwen3-VL with random weights, in BF16."""
    torch.manual_seed(0)
    config = Qwen3VLConfig(vision_config=dict(VISION), text_config=dict(TEXT))
    return Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).eval()


def make_processor():
    """Its image processor; where there is no torchvision, transformers takes the one of pillow."""
    return Qwen2VLImageProcessor(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 4096},
    )


def write_model(folder):
    """The model and its processor in a folder, as from_pretrained reads them."""
    make_model().save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return folder


def make_images(num_images, seed=0):
    """Noise of different sizes."""
    random = np.random.default_rng(seed)
    shapes = [(40 + 8 * (i % 3), 64, 3) for i in range(num_images)]
    return [Image.fromarray(random.integers(0, 255, shape, dtype=np.uint8)) for shape in shapes]


def write_images(folder, num_images, seed=0):
    """Images as files in a folder."""
    folder.mkdir()
    for index, image in enumerate(make_images(num_images, seed)):
        image.save(folder / f"{index:03}.png")
    return folder

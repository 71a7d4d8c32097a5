"""Tiny vision-language models of every family, in float32, and images for them."""

import functools

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE, VIDEO, START, STOP = 3, 4, 5, 6
FIRST_WORD, VOCABULARY = 8, 120
PATCH, MERGE = 4, 2
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_INTERLEAVED = {**_ROPE, "mrope_interleaved": True}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_VISION = {"depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE}
_VISION |= {"temporal_patch_size": 2, "hidden_size": 32, "intermediate_size": 48}
_NEWER = {**_VISION, "out_hidden_size": 64, "num_position_embeddings": 64}
_DEEPSTACK = {**_NEWER, "deepstack_visual_indexes": [0, 2]}
_FULL = {"layer_types": ["full_attention"] * 3, "partial_rotary_factor": 1.0}
# Name -> classes of the model and its config, and what their towers and decoders have.
FAMILIES = {
    "qwen2_vl": (
        "Qwen2VL",
        {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
        | {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2},
        {**_TEXT, "rope_parameters": _ROPE},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {**_VISION, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
        {**_TEXT, "rope_parameters": _ROPE},
    ),
    "qwen3_vl": ("Qwen3VL", _DEEPSTACK, {**_TEXT, "head_dim": 16, "rope_parameters": _INTERLEAVED}),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        _DEEPSTACK,
        {**_TEXT, **_EXPERTS, "head_dim": 16, "rope_parameters": _INTERLEAVED},
    ),
    "qwen3_5": (
        "Qwen3_5",
        _NEWER,
        {**_TEXT, **_FULL, "head_dim": 16, "rope_parameters": {**_INTERLEAVED, **_FULL}},
    ),
}
del FAMILIES["qwen3_5"][2]["rope_parameters"]["layer_types"]


def make_model(family, **changes):
    """A model whose tokens depend on all it attends to, and on every pixel it is shown."""
    torch.manual_seed(1)
    name, vision, text = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vision_config=dict(vision),
        text_config={**text, **changes},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, _std(name))
    return model


def _std(name):
    # Large enough that answers change with an image, its place and what deepstack layers add.
    sizes = {"visual": 0.5, "embed_tokens": 1.0, "self_attn": 0.3}
    return next((size for part, size in sizes.items() if part in name), 0.2)


def make_processor():
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 64 * 64},
    )


@functools.cache
def make_image(number):
    """Noise of 1 to 15 tokens; five sizes in turn, so that 1 and 6 differ in content alone."""
    random = np.random.default_rng(number)
    height, width = [(8, 8), (24, 40), (16, 24), (32, 16), (8, 40)][number % 5]
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def place_images(parts):
    """A prompt of parts, tokens or images' numbers in a one-element list: (tokens, images)."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, list):
            tokens += [START, IMAGE, STOP]
            images.append(make_image(part[0]))
        else:
            tokens += part
    return tuple(tokens), tuple(images)


def generate(model, tokens, images, num_tokens):
    """What generate() answers, greedy; tokens have one place for each image."""
    inputs = {"input_ids": torch.tensor([tokens])}
    if images:
        seen = make_processor()(images=list(images), return_tensors="pt")
        lengths = iter((seen["image_grid_thw"].prod(-1) // MERGE**2).tolist())
        tokens = [t for token in tokens for t in [token] * (next(lengths) if token == IMAGE else 1)]
        ids = torch.tensor([tokens])
        inputs = {**seen, "input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
    out = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(tokens) :].tolist())

"""Vision towers of every fused family with random weights, and patches of images for them."""

from importlib import import_module

import torch

from octavo.layers.encoder_attention import EncoderAttention

SIZES = {
    "depth": 2,
    "hidden_size": 144,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
POSITIONS = {**SIZES, "num_position_embeddings": 64}
QWEN3 = {**POSITIONS, "deepstack_visual_indexes": [0]}
QWEN2 = {**SIZES, "embed_dim": 144, "hidden_size": 32, "mlp_ratio": 1}
del QWEN2["intermediate_size"], QWEN2["out_hidden_size"]
QWEN25 = {**SIZES, "window_size": 16, "fullatt_block_indexes": [1]}
QWEN25_MODEL = "Qwen2_5_VisionTransformerPretrainedModel"
FAMILIES = {
    "glm4v": ("Glm4vVisionConfig", "Glm4vVisionModel", {**SIZES, "image_size": 32}),
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", QWEN25_MODEL, QWEN25),
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel", QWEN2),
    "qwen3_5": ("Qwen3_5VisionConfig", "Qwen3_5VisionModel", POSITIONS),
    "qwen3_5_moe": ("Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionModel", POSITIONS),
    "qwen3_vl": ("Qwen3VLVisionConfig", "Qwen3VLVisionModel", QWEN3),
    "qwen3_vl_moe": ("Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel", QWEN3),
}


def make(family, dtype=torch.float32, **sizes):
    """A tower with random weights; queries look at about 20 of the first image's 96 keys."""
    torch.manual_seed(0)
    config, model, own = FAMILIES[family]
    package = f"transformers.models.{family}"
    make_config = getattr(import_module(f"{package}.configuration_{family}"), config)
    modeling = import_module(f"{package}.modeling_{family}")
    tower = getattr(modeling, model)(make_config(**{**own, **sizes})).eval()
    for block in tower.blocks:
        with torch.no_grad():
            num_rows = block.attn.qkv.weight.shape[0] // 3 * 2
            block.attn.qkv.weight[:num_rows] *= 6
    return tower.to(dtype)


def images(dtype=torch.float32):
    """Three images of 8 × 12, 4 × 4 and 2 × 6 patches."""
    rows = torch.randn(96 + 16 + 12, 96, generator=torch.Generator().manual_seed(0))
    grid = torch.tensor([[1, 8, 12], [1, 4, 4], [1, 2, 6]])
    return {"hidden_states": rows.to(dtype), "grid_thw": grid}


@torch.inference_mode()
def run(model, inputs):
    return model(**inputs).last_hidden_state


def run_layers(model, inputs):
    """(result of the tower, what each attention module returned)."""
    found = []
    hooks = [
        block.attn.register_forward_hook(lambda module, args, out: found.append(out))
        for block in model.blocks
    ]
    out = run(model, inputs)
    for hook in hooks:
        hook.remove()
    return out, found


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, EncoderAttention)]

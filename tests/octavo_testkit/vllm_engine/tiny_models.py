"""Tiny random models with a word tokenizer, saved as checkpoints: what vLLM's engine loads here.

Their attention looks at few tokens and their answers are far from even, so that a wrong mask, page
or scale changes what they say.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VOCABULARY = 320
# What stands for an image in a prompt of the vision models: its place between a start and an end.
IMAGE = [3, 5, 4]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def save_tokenizer(folder: Path, has_images: bool = False) -> None:
    """A tokenizer of 320 words, of which 3 to 6 stand for images if it has any."""
    places = {
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
    }
    special = [*places.values()] if has_images else []
    names = ["<unk>", "<s>", "</s>", *special]
    names += [f"w{number}" for number in range(len(names), VOCABULARY)]
    words = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=special,
        extra_special_tokens=places if has_images else {},
    ).save_pretrained(folder)


@torch.no_grad()
def save(model: torch.nn.Module, folder: Path) -> Path:
    """Save a model with larger weights where scores and logits are made."""
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight *= 6
        elif name.endswith(("v_proj.weight", "o_proj.weight")):
            weight *= 3
        elif name.endswith("lm_head.weight"):
            weight *= 8
        elif ".visual." in name and name.endswith(("qkv.weight", "proj.weight", "fc2.weight")):
            weight *= 6
        elif name.endswith(".bias"):
            weight.normal_(std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    has_images = hasattr(model.config, "vision_config")
    save_tokenizer(folder, has_images)
    if has_images:
        patch_size = model.config.vision_config.patch_size
        Qwen2VLImageProcessorPil(
            min_pixels=(4 * patch_size) ** 2,
            max_pixels=(10 * patch_size) ** 2,
            patch_size=patch_size,
        ).save_pretrained(folder)
    return folder


def save_llama(folder: Path, **sizes: int) -> Path:
    """Grouped heads, biases, full attention."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, **sizes}, attention_bias=True)
    return save(LlamaForCausalLM(config), folder)


def save_gemma2(folder: Path) -> Path:
    """A sliding window of 16 tokens in every other layer, and a soft-cap."""
    torch.manual_seed(1)
    config = Gemma2Config(
        **{**SIZES, "tie_word_embeddings": True},
        sliding_window=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=None,
        query_pre_attn_scalar=64,
    )
    return save(Gemma2ForCausalLM(config), folder)


def save_mixtral(folder: Path) -> Path:
    """Experts, which the plug-in leaves alone."""
    torch.manual_seed(2)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return save(MixtralForCausalLM(config), folder)


# 2 heads of 72 values, as in Qwen3-VL; vLLM's own FP8 attention would pad them to 80.
VISION = {"depth": 2, "num_heads": 2}
TEXT = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
IMAGE_TOKENS = {
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": 5,
    "video_token_id": 6,
}


def save_qwen2_vl(folder: Path) -> Path:
    """Images before text; patches of 14."""
    torch.manual_seed(3)
    text = {**TEXT, "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [8, 12, 12]}}
    vision = {**VISION, "embed_dim": 144, "hidden_size": SIZES["hidden_size"], "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **IMAGE_TOKENS)
    return save(Qwen2VLForConditionalGeneration(config), folder)


def save_qwen3_vl(folder: Path) -> Path:
    """Images before text; patches of 16, and the first block's output joins the text, too."""
    torch.manual_seed(4)
    text = {**TEXT, "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [12, 10, 10]}}
    vision = {
        **VISION,
        "hidden_size": 144,
        "intermediate_size": 256,
        "out_hidden_size": SIZES["hidden_size"],
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **IMAGE_TOKENS)
    Qwen3VLVideoProcessor().save_pretrained(folder)
    return save(Qwen3VLForConditionalGeneration(config), folder)

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
)

VOCABULARY = 320
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


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of 320 words."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
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
        elif name.endswith(".bias"):
            weight.normal_(std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
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

"""Small decoders of every family, with random weights that make their logits differ."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 200
_BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_EXPERTS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
}  # all: routing has no edge to fall off
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "smollm3": {},
    "mistral": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8, **_EXPERTS},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
}


def make_decoder(family, dtype=torch.float32, **changes):
    """A decoder of a family, for inference."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_BASE, **FAMILIES.get(family, {}), **changes})
    # Eager: other stock attention leaves soft-caps out.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    return model.to(dtype)


def make_prompts(batch, length, seed=1):
    """Prompts of which all but the first are padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : min(3 * row, length - 1)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def save_decoder(folder, model):
    """A model's folder, with a tokenizer that has a token for each byte; the model needs 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0} | {letter: index for index, letter in enumerate(letters, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    model.save_pretrained(folder)
    return folder

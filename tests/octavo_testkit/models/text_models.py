"""Small decoders of every family with random weights that make their logits differ; a tokenizer."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

VOCABULARY = 200
NUM_TOKENS = 300  # of the tokenizer; 258 are bytes alone, BOS and padding
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


def few(*quick):
    """All families as parameters; those that are not named here are for `make test-slow`."""
    assert set(quick) <= FAMILIES.keys()
    return [pytest.param(f, marks=[] if f in quick else pytest.mark.slow) for f in FAMILIES]


# A decoder with a vision tower beside it.
VISION_LANGUAGE = "qwen3_vl"
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
SENTENCES = (
    "The cache holds the keys and values of every token that was seen.",
    "Eight bits are enough for most of them, if the scales are right.",
    "A long text is cut into windows, and a chat goes through its template.",
)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'banned' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
)


def make_decoder(family="llama", dtype=torch.float32, attn_implementation="eager", **changes):
    """A decoder of a family, for inference. Eager: other stock attention leaves soft-caps out."""
    torch.manual_seed(0)
    sizes = {**_BASE, **FAMILIES.get(family, {}), **changes}
    maker = AutoModelForCausalLM
    if family == VISION_LANGUAGE:
        maker = AutoModelForImageTextToText
        sizes = {"vision_config": dict(_VISION), "text_config": {**sizes, "rope_parameters": _ROPE}}
    config = AutoConfig.for_model(family, **sizes)
    model = maker.from_config(config, attn_implementation=attn_implementation).eval()
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


def make_tokenizer(chat_template=TEMPLATE, has_bos=True, num_tokens=NUM_TOKENS):
    """Bytes and some pairs of them, trained on a few sentences; BOS in front of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=["<pad>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if has_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    special = {"bos_token": "<s>", "pad_token": "<pad>"}
    if not has_bos:  # on purpose
        special["add_bos_token"] = False
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.chat_template = chat_template
    return made


def save_decoder(folder, model, **tokenizer):
    """A model's folder with a tokenizer, whose tokens the model must have."""
    model.save_pretrained(folder)
    made = make_tokenizer(**tokenizer)
    made.save_pretrained(folder)
    if made.init_kwargs.get("add_bos_token") is False:  # which transformers does not write
        path = Path(folder) / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": False}))
    return folder

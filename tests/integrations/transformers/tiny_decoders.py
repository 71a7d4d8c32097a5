"""Tiny language models of several families with random weights, and a tokenizer of bytes."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def make_tokenizer(chat_template=TEMPLATE, has_bos=True):
    """Bytes and some pairs of them, trained on a few sentences; BOS in front of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if has_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>"
    )
    made.chat_template = chat_template
    return made


def _config(family):
    sizes = dict(SIZES)
    match family:
        case "llama":
            return transformers.LlamaConfig(**sizes)
        case "qwen3":  # a norm of queries and keys
            return transformers.Qwen3Config(**sizes)
        case "gemma2":
            return transformers.Gemma2Config(**sizes, sliding_window=8)
        case "gemma3":
            sizes["num_hidden_layers"] = 6
            return transformers.Gemma3TextConfig(**sizes, sliding_window=8)
        case "gpt_oss":
            experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
            return transformers.GptOssConfig(**sizes, **experts, sliding_window=8)
        case "qwen3_vl":
            rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
            return transformers.Qwen3VLConfig(
                vision_config=dict(VISION), text_config={**sizes, "rope_parameters": rope}
            )
    raise AssertionError(family)


FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "qwen3_vl")


def make_model(family="llama", **attention):
    """A model with random weights in float32, large enough to tell the layers apart."""
    torch.manual_seed(0)
    if family == "qwen3_vl":
        kind = transformers.Qwen3VLForConditionalGeneration
        model = kind(_config(family))
    else:
        model = transformers.AutoModelForCausalLM.from_config(_config(family), **attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.08)
    return model.eval()


def write_model(folder, family="llama", **tokenizer):
    """A model and its tokenizer in a folder, as from_pretrained reads them."""
    make_model(family).save_pretrained(folder)
    make_tokenizer(**tokenizer).save_pretrained(folder)
    return folder

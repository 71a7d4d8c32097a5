"""GGUF files of a small Llama with its tokenizer, as llama.cpp's converter writes them."""

import json

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path, model, tokenizer, *, dtype=Type.F32, rope_factors=None, scaling=None):
    """Write a Llama of transformers; returns the path. dtype: of matrices, such as Type.Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        _add_tensor(writer, name, tensor.float().numpy(), config, dtype)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer, name, x, config, dtype):
    layer, _, leaf = name.rpartition(".")
    prefix = ""
    if layer.startswith("model.layers."):
        _, _, number, layer = layer.split(".", 3)
        prefix = f"blk.{number}."
    heads = {"self_attn.q_proj": config.num_attention_heads}
    heads["self_attn.k_proj"] = config.num_key_value_heads
    if layer in heads:  # llama.cpp rotates neighbours, transformers halves
        x = x.reshape(heads[layer], 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
    kind = dtype if x.ndim == 2 else Type.F32
    data = gguf.quants.quantize(np.ascontiguousarray(x), kind)
    writer.add_tensor(f"{prefix}{_NAMES[layer]}.{leaf}", data, raw_dtype=kind)


def _add_tokenizer(writer, tokenizer, vocab_size):
    document = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    by_id = {number: token for token, number in document["vocab"].items()}
    special = set(tokenizer.all_special_tokens)
    tokens = [by_id.get(number, f"<unused{number}>") for number in range(vocab_size)]
    kinds = [
        gguf.TokenType.CONTROL
        if token in special
        else gguf.TokenType.UNUSED
        if token.startswith("<unused")
        else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in document["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer.chat_template)

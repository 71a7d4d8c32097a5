"""Checkpoint folders by hand: a config, names of weights, and whatever scales a test wants."""

import json

import torch
from safetensors.torch import save_file

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 2, 4, 2
LAYERS = [f"model.layers.{number}.self_attn" for number in range(NUM_LAYERS)]
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
}
SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


def compressed_tensors(**scheme):
    """The quantization_config of compressed-tensors with this kv_cache_scheme."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {**SCHEME, **scheme},
    }


def scales(form, values, layers=LAYERS, dtype=torch.float32, shape=(1,)):
    """Scales by a name's form such as "{layer}.{part}_scale"; values: part -> numbers by layer."""
    return {
        form.format(layer=layer, part=part): torch.tensor(by_layer[number], dtype=dtype).reshape(
            shape
        )
        for number, layer in enumerate(layers)
        for part, by_layer in values.items()
    }


def weights(layers=LAYERS, projections=("q_proj", "k_proj", "v_proj")):
    """A weight for each projection, in BF16."""
    names = [f"{layer}.{projection}.weight" for layer in layers for projection in projections]
    return {name: torch.randn(4, 4).bfloat16() for name in names}


def write(folder, tensors, quantization_config=None, hf_quant_config=None, config=CONFIG):
    """Write a checkpoint with one file of weights; returns the folder."""
    folder.mkdir(exist_ok=True)
    if quantization_config is not None:
        config = {**config, "quantization_config": quantization_config}
    (folder / "config.json").write_text(json.dumps(config))
    if hf_quant_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def modelopt(algo="FP8"):
    """An hf_quant_config.json."""
    return {
        "producer": {"name": "modelopt", "version": "0.29"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": algo, "exclude_modules": []},
    }

"""Find static scales of a KV cache, save them, use them, and write a checkpoint for vLLM."""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.integrations.checkpoints.export import export_checkpoint
from octavo.integrations.checkpoints.kv_scales import read_kv_scales

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None, pad_token_id=0)).eval()

# Four windows of text; with a real model, `octavo calibrate MODEL --kv --data TEXT` does this.
windows = [{"input_ids": torch.randint(128, (1, 64))} for _ in range(4)]
scales = octavo.calibrate_kv(model, windows, octavo.CalibrationSettings(granularity="head"))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "kv.json")
    octavo.save_scales(path, scales)
    print(path.read_text())

    model.save_pretrained(Path(folder, "model"))
    export_checkpoint(Path(folder, "model"), scales, Path(folder, "for-vllm"))
    assert read_kv_scales(Path(folder, "for-vllm")) is not None

    settings = {"granularity": "head", "scaling": "static"}
    print(octavo.apply_(model, octavo.Recipe(kv_cache=settings, scales=str(path))))
    print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False))

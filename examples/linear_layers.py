"""Quantize the linear layers of a model, save it, and load it bit for bit."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import octavo

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 200}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
ids = torch.arange(20)[None]
with torch.inference_mode():
    before = model(ids).logits
    print(octavo.quantize_(model, "fp8"))
    after = model(ids).logits
print(f"relative error {(after - before).norm() / before.norm():.3f}")

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
with torch.inference_mode():
    assert torch.equal(again(ids).logits, after)
print("saved and loaded bit for bit")

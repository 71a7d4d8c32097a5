"""Answer many prompts at once with octavo.LLM: continuous batching over FP8 pages."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import octavo

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None)).eval()

recipe = octavo.Recipe(kv_cache={"granularity": "token"}, linear="fp8")
settings = octavo.EngineSettings(max_num_seqs=8, num_pages=32)
prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]  # texts, if the model is given by name
with octavo.LLM(model, recipe=recipe, settings=settings) as llm:
    for answer in llm.generate(prompts, octavo.Sampling(temperature=0, max_tokens=5)):
        print(answer.tokens, answer.finish_reason)

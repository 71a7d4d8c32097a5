"""Find needles in long prompts, unquantized and with an FP8 KV cache.

`octavo eval needle` does this for any model, with standard errors and a heat map.
"""

import torch

import octavo
from octavo.demo.retrieval_model import load_retrieval_model
from octavo.measure.evaluate.needle import PairHaystack

found = load_retrieval_model(device="cpu")
haystack = PairHaystack()
prompts = [haystack.make(length=1024, depth=depth, seed=0) for depth in (0.0, 0.5, 1.0)]


def count_found() -> int:
    """How many needles the model finds with its next token."""
    count = 0
    for prompt in prompts:
        ids = found.tokenizer(prompt.text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            token = int(found.model(ids, use_cache=True).logits[0, -1].argmax())
        count += prompt.is_found(found.tokenizer.decode([token]))
    return count


plain = count_found()
print(octavo.apply_(found.model, octavo.Recipe(kv_cache={"scaling": "unit"})))
print(f"found {plain} of {len(prompts)} unquantized, {count_found()} in FP8")

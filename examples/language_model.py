"""Generate text with transformers over a KV cache in FP8.

The model looks up keys: its answer is right only if attention over the whole prompt is.
"""

import octavo
from octavo.demo.retrieval_model import load_retrieval_model

found = load_retrieval_model(device="cpu")
prompt = found.tokenizer("<s> ban 17 dor 42 fel 35 ? dor", return_tensors="pt")

# One scale for each token and head: nothing to calibrate.
print(octavo.apply_(found.model, octavo.Recipe(kv_cache={"granularity": "token"})))
ids = found.model.generate(prompt["input_ids"], max_new_tokens=1, do_sample=False)
answer = found.tokenizer.decode(ids[0, -1])
octavo.restore_(found.model)

print(f"dor is {answer}")
assert answer == "42"

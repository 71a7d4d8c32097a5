"""Ask what to quantize in a model on a GPU; neither the GPU nor the weights are needed."""

from octavo.measure.advise.advise import advise
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.model_shape import find_model
from octavo.measure.advise.workload import Workload

# A known model, or the folder of a config.json. `octavo advise` adds the records of octavo.
workload = Workload(context=32768, concurrency=8)
found = advise(find_model("llama-3.1-8b"), find_gpu("h200"), workload)
print(found.recipe.describe())
for reason in found.reasons:
    print("-", reason)

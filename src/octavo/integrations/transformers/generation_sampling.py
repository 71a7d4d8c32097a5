"""The sampling parameters that a model's generation config recommends."""

from typing import Any

from octavo.integrations.transformers.load import loading

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_sampling(generation_config: Any) -> dict[str, float]:
    """Those that it sets, by the names of OpenAI's and vLLM's APIs.

    {"temperature": 0}, the likeliest token always, if it does not sample. What it leaves out is no
    limit: transformers' own default of top_k, 50, is not taken.
    """
    found = {name: getattr(generation_config, name, None) for name in _NAMES}
    given = {name: value for name, value in found.items() if value is not None}
    if not getattr(generation_config, "do_sample", None):
        penalty = given.get("repetition_penalty", 1.0)
        return {"temperature": 0.0, **({} if penalty == 1 else {"repetition_penalty": penalty})}
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {"temperature": 1.0} | {
        name: value for name, value in given.items() if value != neutral.get(name)
    }


def load_generation_sampling(name: str) -> dict[str, float]:
    """Those of the generation_config.json of a folder or a model of the hub."""
    from transformers import GenerationConfig

    with loading(name, "a generation_config.json"):
        return generation_sampling(GenerationConfig.from_pretrained(name, trust_remote_code=False))

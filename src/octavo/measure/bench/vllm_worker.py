"""vLLM's engine in a process of its own, which `vllm_engine.py` starts and talks to.

It runs in the Python that vLLM is installed in, so it imports nothing of octavo. Each line on stdin
is a JSON object that asks for something, each line on stdout one that answers.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

# Seconds between two lines about the progress of a load.
PROGRESS_S = 0.5
# Of a GPU's memory: left free for what engines allocate beside weights and cache.
SPARE = 0.03


def start(settings: Mapping[str, Any], memory_fraction: float) -> Any:
    """An engine of these arguments, with no more of the GPU's memory than is free."""
    import torch
    from vllm import EngineArgs, LLMEngine

    if settings["attention_backend"] == "OCTAVO":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        # The names of vLLM 0.26 are a closed list, in which the plug-in has another one.
        name = "OCTAVO" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
        settings = {**settings, "attention_backend": name}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        settings = {
            **settings,
            "gpu_memory_utilization": min(memory_fraction, free / total - SPARE),
        }
    return LLMEngine.from_engine_args(EngineArgs(**settings))


def about(engine: Any) -> dict[str, Any]:
    """What records say of the engine: what vLLM chose where nothing was asked for."""
    import vllm

    config = engine.vllm_config
    return {
        "vllm": vllm.__version__,
        "page_size": config.cache_config.block_size,
        "num_pages": config.cache_config.num_gpu_blocks,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "compile": bool(int(config.compilation_config.mode or 0)),
        "cuda_graphs": str(config.compilation_config.cudagraph_mode).rpartition(".")[2],
    }


def serve(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    output_lens: Sequence[int],
    max_concurrency: int | None,
    logprobs: int | None,
    answers: TextIO,
) -> dict[str, Any]:
    """Serve requests greedily, at most so many at once: their times, tokens and log-probabilities.

    The clock is that of octavo's own rows: a token's time is the end of the step that gave it.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    results: list[dict[str, Any]] = [
        {"start_s": 0.0, "parts_s": [], "tokens": [], "logprobs": [], "end": None} for _ in prompts
    ]
    waiting, num_open, num_tokens, told_s = list(range(len(prompts)))[::-1], 0, 0, 0.0
    limit = max_concurrency or len(prompts)
    began = time.perf_counter()
    while waiting or num_open:
        while num_open < limit and waiting:
            index = waiting.pop()
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=output_lens[index],
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs,
                output_kind=RequestOutputKind.DELTA,
            )
            results[index]["start_s"] = time.perf_counter()
            engine.add_request(str(index), {"prompt_token_ids": list(prompts[index])}, sampling)
            num_open += 1
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            (answer,), result = output.outputs, results[int(output.request_id)]
            result["parts_s"] += [now] * len(answer.token_ids)
            result["tokens"] += answer.token_ids
            result["logprobs"] += map(top_logprobs, answer.logprobs or ())
            num_tokens += len(answer.token_ids)
            if output.finished:
                result["end"] = answer.finish_reason
                num_open -= 1
        if now - told_s > PROGRESS_S:
            tell(answers, {"num_tokens": num_tokens})
            told_s = now
    duration_s = time.perf_counter() - began
    tell(answers, {"num_tokens": num_tokens})
    return {"results": results, "duration_s": duration_s}


def top_logprobs(place: Mapping[int, Any]) -> list[tuple[int, float]]:
    """The likeliest tokens in one place of an answer."""
    return [(token, one.logprob) for token, one in place.items()]


def tell(answers: TextIO, answer: Mapping[str, Any]) -> None:
    """Write one line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def run(asked: Iterable[str], answers: TextIO) -> None:
    """Do what each line asks for; an error is an answer, too."""
    engine: Any = None
    for line in asked:
        request = json.loads(line)
        try:
            if engine is None:
                engine = start(**request)
                tell(answers, {"about": about(engine)})
            else:
                tell(answers, {"served": serve(engine, **request, answers=answers)})
        except Exception as error:
            tell(answers, {"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    # vLLM prints to stdout: that goes to stderr, and answers go where stdout was.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run(sys.stdin, lines)

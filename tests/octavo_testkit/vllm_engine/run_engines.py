"""Runs vLLM's engine for each job of a file, one after the other; answers go to another file.

A job has a name, arguments of the engine, and prompts: tokens, or {"tokens": …, "image": [height,
width, seed]}. Its answer has the tokens with their log-probabilities, what ran the layers, and what
octavo logged; or the error that ended it.
Every job has its own engine, and all of them are in this process.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams

from octavo_testkit.vllm_engine.look import look

TOP = 20


def prompt_of(given: Any) -> dict[str, Any]:
    """A prompt as vLLM takes it; an image has blocks of 14 pixels in colors of its own."""
    if isinstance(given, list):
        return {"prompt_token_ids": given}
    height, width, seed = given["image"]
    size = (-(-height // 14), -(-width // 14), 3)
    blocks = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    pixels = blocks.repeat(14, 0).repeat(14, 1)[:height, :width]
    images = {"image": Image.fromarray(pixels)}
    return {"prompt_token_ids": given["tokens"], "multi_modal_data": images}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One engine and its answers."""
    shared = {"max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True, "dtype": "bfloat16"}
    shared["disable_log_stats"] = False  # they count preemptions
    llm = LLM(**{**shared, **job["engine"]})
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job.get("max_tokens", 12),
        ignore_eos=True,
        logprobs=TOP,
        detokenize=False,
    )
    answers = llm.generate([prompt_of(x) for x in job["prompts"]], sampling, use_tqdm=False)
    counted = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "logprobs": [
            [{token: x.logprob for token, x in step.items()} for step in answer.outputs[0].logprobs]
            for answer in answers
        ],
        "preemptions": counted.get("vllm:num_preemptions", 0),
        **llm.apply_model(look)[0],
    }


def main(jobs_file: str, answers_file: str) -> None:
    """Run all jobs; an answer is written as soon as it is there."""
    lines: list[str] = []
    make = logging.getLogRecordFactory()

    def note(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        if record.name == "vllm.plugins.octavo":
            lines.append(record.getMessage())
        return record

    logging.setLogRecordFactory(note)
    answers: dict[str, Any] = {}
    for job in json.loads(Path(jobs_file).read_text()):
        lines.clear()
        try:
            answers[job["name"]] = run(job)
        except Exception as error:
            answers[job["name"]] = {"error": f"{type(error).__name__}: {error}"}
        answers[job["name"]]["log"] = list(lines)
        Path(answers_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])

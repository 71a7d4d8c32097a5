"""vLLM's engine in a process of its own, and how far two of its answers are apart."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("run_engines.py")
# A CPU engine with a small cache, in one process, that asks no hub and sends no statistics.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
# Lengths 1, a page, a page plus one, and odd ones; no token comes evenly.
PROMPTS = [[(7 * i * i + 3 * n) % 300 + 5 for i in range(n)] for n in (5, 40, 130, 1, 64, 128, 129)]


def is_0_26() -> bool:
    """Whether this environment has vLLM 0.26."""
    return version("vllm").startswith("0.26.")


# What --attention-backend calls octavo.
BACKEND = "CUSTOM" if is_0_26() else "OCTAVO"


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that runs vLLM."""
    paths = [str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), **changes}


def run_engines(
    jobs: Mapping[str, Mapping[str, Any]],
    folder: Path,
    *,
    prompts: Sequence[Any] = PROMPTS,
    before: str = "",
    **changes: str,
) -> dict[str, dict[str, Any]]:
    """The answers of all jobs, by name.

    jobs: arguments of engines by name; "max_tokens" is of the sampling. prompts: tokens, or
    {"tokens": …, "image": [height, width, seed]}; a job may have its own. before: Python that the
    process runs first. changes: of its environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = [{"name": name, "engine": dict(engine)} for name, engine in jobs.items()]
    for job in made:
        job["prompts"] = job["engine"].pop("prompts", prompts)
        job["max_tokens"] = job["engine"].pop("max_tokens", 16)
    (folder / "jobs.json").write_text(json.dumps(made))
    arguments = [str(folder / "jobs.json"), str(folder / "answers.json")]
    command = [str(SCRIPT), *arguments]
    if before:
        code = f"{before}\nimport runpy, sys\nsys.argv = {command}\n"
        command = ["-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment(**changes),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=1800,
        )
    assert done.returncode == 0, (folder / "log").read_text()[-5000:]
    answers: dict[str, dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return answers


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, int]:
    """The RMS difference of log-probabilities of two answers, and how many tokens it is of.

    Sequences are compared as far as they agree, and one token further: up to there both engines
    have read the same.
    """
    for answer in (one, other):
        assert "error" not in answer, answer["error"]
    squares, num_tokens = [], 0
    fields = (one["tokens"], other["tokens"], one["logprobs"], other["logprobs"])
    for steps in (zip(*sequence, strict=True) for sequence in zip(*fields, strict=True)):
        for token, other_token, logprobs, other_logprobs in steps:
            num_tokens += 1
            both = logprobs.keys() & other_logprobs.keys()
            squares += [(logprobs[key] - other_logprobs[key]) ** 2 for key in both]
            if token != other_token:
                break
    return (sum(squares) / len(squares)) ** 0.5, num_tokens

"""The plug-in in vLLM's other processes: tensor parallelism, and the OpenAI server."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo_testkit.vllm_engine.engines import BACKEND, apart, environment, run_engines

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

VLLM = str(Path(sys.executable).with_name("vllm"))
ASKED = {"attention_backend": BACKEND, "kv_cache_dtype": "fp8", "quantization": "octavo"}
START_S = 600


def test_two_processes_say_what_one_says(models, tmp_path):
    """Each rank quantizes its part of every weight, and has one of the two KV heads."""
    engine = {"model": str(models / "llama"), "max_tokens": 12}
    two = {"tensor_parallel_size": 2}
    processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    bf16 = {"attention_backend": BACKEND}
    one = run_engines({"bf16": {**engine, **bf16}, "fp8": {**engine, **ASKED}}, tmp_path / "1")
    both = {}
    for name, asked in (("bf16", bf16), ("fp8", ASKED)):
        jobs = {name: {**engine, **two, **asked}}
        both |= run_engines(jobs, tmp_path / f"2-{name}", **processes)
    rms, num_tokens = apart(one["bf16"], both["bf16"])
    assert rms < 0.03
    assert num_tokens > 60
    assert {kind for kind, *_ in both["fp8"]["attention"].values()} == {"OctavoAttention"}
    assert sum(made is not None for _, made in both["fp8"]["methods"].values()) == 8
    # Scales of the parts of a row are other ones: as far apart as from BF16, at most.
    assert apart(one["fp8"], both["fp8"])[0] < apart(one["bf16"], both["fp8"])[0] * 1.5
    log = (tmp_path / "2-fp8" / "log").read_text()
    assert log.count("octavo runs 8 linear layers in FP8") == 2  # once in each worker


@contextmanager
def served(model, log):
    """`vllm serve` with the plug-in; the address that answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [VLLM, "serve", str(model), "--max-model-len", "512", "--enforce-eager"]
    command += ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "tiny", "--attention-backend", BACKEND]
    command += ["--kv-cache-dtype", "fp8", "--quantization", "octavo"]
    command += ["--additional-config", json.dumps({"octavo": {"ignored_layers": ["down_proj"]}})]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        changes = environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
        server = subprocess.Popen(command, env=changes, stdout=out, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + START_S
            while not is_healthy(address):
                assert server.poll() is None, log.read_text()[-5000:]
                assert time.monotonic() < end, log.read_text()[-5000:]
                time.sleep(1)
            yield address
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def is_healthy(address):
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_the_server_answers_and_the_benchmark_completes(models, tmp_path):
    log = tmp_path / "serve.log"
    with served(models / "llama", log) as address:
        question = {"model": "tiny", "prompt": "w5 w6 w7", "max_tokens": 5, "temperature": 0}
        question |= {"ignore_eos": True}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(question).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            body = json.load(answer)
        assert body["usage"]["completion_tokens"] == 5
        assert len(body["choices"][0]["text"].split()) == 5
        command = [VLLM, "bench", "serve", "--backend", "vllm", "--base-url", address]
        command += ["--model", "tiny", "--tokenizer", str(models / "llama")]
        command += ["--dataset-name", "random", "--random-input-len", "32"]
        command += ["--random-output-len", "8", "--num-prompts", "6", "--save-result"]
        command += ["--result-dir", str(tmp_path), "--result-filename", "bench.json"]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-5000:]
        result = json.loads((tmp_path / "bench.json").read_text())
        assert result["completed"] == 6
    text = log.read_text()
    assert "octavo runs attention in 2 layers, over a KV cache in FP8 (e4m3)" in text
    assert "octavo runs 6 linear layers in FP8" in text

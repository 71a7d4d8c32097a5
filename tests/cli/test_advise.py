"""octavo advise on the command line."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from octavo.cli.main import COMMANDS, make_app, run
from octavo.recipe import Recipe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.fixture
def advise(capsys):
    def call(*args):
        code = run(make_app(COMMANDS), ["advise", *args])
        return code, *capsys.readouterr()

    return call


def test_a_recipe_with_reasons(advise):
    code, out, _ = advise(
        *("gpt-oss-like", "--context", "32k", "--concurrency", "8", "--results", str(RESULTS))
    )
    assert code == 0
    for text in ("a token (ITL), 8 × 32,768 tokens", "KV cache of a sequence", "Why", "Mind"):
        assert text in out
    toml = out.partition("Recipe (recipe.toml)\n")[2].partition("octavo serve")[0]
    assert Recipe.from_toml(toml).skip_layers == ("sliding_window",)
    command = "octavo serve MODEL --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window"
    assert command in out
    verdict = out.partition("Use FP8: ")[2]
    assert verdict.startswith("yes, if quality holds") and "predicted." in verdict


def test_records_are_found_from_any_folder(advise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "of_something_else.jsonl").write_text("{}")
    code, out, _ = advise("llama-3.1-8b", "--json", "--gpu", "h200", "--context", "1k")
    document = json.loads(out)
    assert code == 0 and document["gpu"] == "h200" and document["workload"]["context"] == 1024
    assert not any("No records of kernels" in text for text in document["warnings"])
    assert "llama-3.1-8b" in document["expectations"][0]["based_on"]


def test_records_are_found_in_an_installed_package(tmp_path):
    """The files of a wheel, by links: the package, and what pyproject.toml puts into it."""
    site, elsewhere = tmp_path / "site-packages", tmp_path / "elsewhere"
    (site / "octavo").mkdir(parents=True)
    elsewhere.mkdir()
    for path in (ROOT / "src" / "octavo").iterdir():
        (site / "octavo" / path.name).symlink_to(path)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    for source, place in wheel["targets"]["wheel"].get("force-include", {}).items():
        (site / place).symlink_to(ROOT / source)
    code = (
        "from octavo.measure import store; rows = store.read(store.shipped()); "
        "print(store.shipped(), sum(row.op == 'scaled_mm' for row in rows))"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    folder, number = ran.stdout.split()
    assert folder == str(site / "octavo" / "results") and int(number) > 100


def test_hub_names_are_in_the_command(advise):
    code, out, _ = advise("openai/gpt-oss-20b", "--context", "32k", "--gpu", "hopper")
    assert code == 0 and "gpt-oss-20b (a language model) on NVIDIA H200" in out
    assert "octavo serve openai/gpt-oss-20b --kv-cache-dtype fp8" in out
    assert "octavo was never run" not in out


@pytest.mark.parametrize("gpu", ["ada", "blackwell", "ampere"])
def test_gpus_that_octavo_never_ran_on_are_marked(advise, gpu):
    code, out, _ = advise("tiny", "--gpu", gpu)
    out = " ".join(out.split())  # the caption of a narrow table is wrapped
    assert code == 0 and "(predicted: octavo was never run on this GPU)" in out
    assert f"nor on any other GPU of {gpu.capitalize()}" in out
    assert "are compiled for it in tests" in out


def test_what_serve_refuses_has_no_command_of_it(advise, tmp_path):
    from transformers import Qwen3NextConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "num_experts": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    Qwen3NextConfig(**sizes).save_pretrained(tmp_path)
    code, out, _ = advise(str(tmp_path))
    assert code == 0 and f"octavo serve {tmp_path}" not in out
    assert "octavo serve cannot run this model: Qwen3NextForCausalLM" in out
    assert f"vllm serve {tmp_path}" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nope"], "or a name of llama-3.1-8b"),
        (["qwen3-vl-9b"], "Did you mean qwen3-vl-8b"),
        (["tiny", "--gpu", "v100"], "expected a GPU of h200"),
        (["tiny", "--context", "many"], "expected a number of tokens"),
        (["tiny", "-o", "x.jsonl"], "-o is for the records of --measure"),
        (["tiny", "--results", "no-such-folder"], "found none at no-such-folder"),
    ],
)
def test_errors(advise, args, message):
    code, _, err = advise(*args)
    assert code == 1 and message in " ".join(err.split())


def test_measure_without_a_gpu_says_what_cannot_be_measured(advise):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = advise("tiny", "--measure")
    assert code == 1 and "cannot measure the engine's latency at 1 × 8,192" in err

"""octavo advise on the command line."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from octavo.cli.main import COMMANDS, make_app, run
from octavo.recipe import Recipe

RESULTS = Path(__file__).parents[2] / "results"


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


def test_json_without_records(advise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = advise("tiny", "--json", "--gpu", "l40s", "--context", "1k")
    document = json.loads(out)
    assert code == 0 and document["gpu"] == "l40s" and document["workload"]["context"] == 1024
    assert any("No records of kernels" in text for text in document["warnings"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nope"], "or a name of llama-3.1-8b"),
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

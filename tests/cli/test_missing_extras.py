"""Every command after `pip install .` without extras: it runs, or names the extra to install."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import octavo
from octavo.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Command -> arguments and the extras that the answer names, or None if it needs none.
CALLS: dict[str, list[tuple[str, str | None]]] = {
    "advise": [
        ("llama-3.1-8b", "transformers"),
        ("llm", "transformers"),
        ("flux.1-dev", "transformers"),
    ],
    "bench diffusion": [("", "diffusers"), ("--config tiny-flux", "diffusers")],
    "bench encoder": [("", "transformers"), ("llm", "transformers")],
    "bench generate": [("", "transformers")],
    "bench host": [("", None)],
    "bench kernels": [("--op append_kv", None)],
    "bench latency": [("", "transformers"), ("llm", "transformers")],
    "bench mm-processor": [
        ("", "data,transformers"),
        ("--model llm --dataset-name hf --dataset-path images", "data,transformers"),
    ],
    "bench serve": [
        ("--base-url http://127.0.0.1:9", "server"),
        ("--base-url http://127.0.0.1:9 --dataset-name random-mm", "data"),
    ],
    "bench sweep": [("sweep.toml -o sweep.jsonl", "transformers")],
    "bench throughput": [("", "transformers"), ("llm", "transformers")],
    "calibrate": [
        ("--data images --scale-save-path s.json", "data,transformers"),
        ("llm --kv --data text.txt --scale-save-path s.json", "transformers"),
        ("llm --kv --data some/set --scale-save-path s.json", "data"),
        ("--pipeline --prompt cat --scale-save-path s.json", "diffusers"),
        ("pipe --pipeline --prompt cat --sensitivity", "diffusers"),
    ],
    "demo": [("-o demo", "demo")],
    "doctor": [("", None), ("llm --context 128k", "transformers"), ("llm --kv", "transformers")],
    "eval chartqa": [("", "data,transformers"), ("llm", "data,transformers")],
    "eval choice": [
        ("llm --data choices.jsonl", "transformers"),
        ("llm --data some/set", "data"),
        ("llm --data problems.parquet", "data"),
        ("--endpoint http://127.0.0.1:9", "server"),
    ],
    "eval code": [
        ("llm --allow-code", "transformers"),
        ("--endpoint http://127.0.0.1:9 --allow-code", "server"),
    ],
    "eval images": [("", "diffusers"), ("pipe --prompt cat", "diffusers")],
    "eval math": [
        ("llm", "math"),
        ("--endpoint http://127.0.0.1:9", "math"),
    ],
    "eval mrcr": [("llm", "transformers")],
    "eval needle": [("", "transformers"), ("llm", "transformers")],
    "eval perplexity": [("llm --data text.txt", "transformers")],
    "eval tasks": [("llm --tasks gsm8k", "lm-eval,transformers")],
    "export": [("llm --scales scales.json -o exported", None)],
    "image": [("--prompt cat", "diffusers"), ("--model pipe --prompt cat", "diffusers")],
    "report": [("", "report"), ("results", "report")],
    "serve": [
        ("", "server,transformers"),
        ("llm", "server,transformers"),
        ("chart-reader", "server,transformers"),
        ("--omni", "diffusers,server"),
    ],
    "warmup": [("--shapes 16x16x16", None), ("pipe --tokens 4", "diffusers")],
}

# Runs command lines in an interpreter that finds no module of REFUSED, as if not installed.
DRIVER = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder

refused, lines = json.load(sys.stdin)

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in refused else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]

from octavo.cli.console import err, out
from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure.bench import benchmark

# Half a minute on a CPU; nothing in it is optional.
benchmark.measure_ceilings = lambda device: benchmark.Ceilings(gb_per_s=1.0, bf16_tflops=1.0)
answers = []
for line in lines:
    text = io.StringIO()
    out.file = err.file = text
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = run(make_app(COMMANDS), line.split())
    answers.append([code, text.getvalue()])
print(json.dumps(answers))
"""


def base_packages() -> set[str]:
    """Names of all distributions that `pip install .` brings, by pyproject and their metadata."""
    found: set[str] = {"octavo"}
    todo = [Requirement(text) for text in PROJECT["dependencies"]]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        todo += [Requirement(text) for text in metadata.requires(name) or []]
    return found


def optional_modules() -> list[str]:
    """Importable names that no distribution of the base installation has."""
    base = base_packages()
    return [
        module
        for module, names in metadata.packages_distributions().items()
        if base.isdisjoint(map(canonicalize_name, names))
    ]


def make_files(folder: Path) -> None:
    """What the command lines of CALLS name."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 128}
    (folder / "llm").mkdir()
    (folder / "llm" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (folder / "pipe").mkdir()
    (folder / "pipe" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    (folder / "images").mkdir()
    (folder / "images" / "a.png").touch()
    (folder / "results").mkdir()
    (folder / "text.txt").write_text("hello world " * 300)
    (folder / "problems.parquet").touch()
    choice = {"question": "1 + 1?", "choices": ["1", "2"], "answer": 1}
    (folder / "choices.jsonl").write_text(json.dumps(choice) + "\n")
    scales = {"model.layers.0.self_attn.attn": {"q": 1.0, "k": 1.0, "v": 1.0}}
    (folder / "scales.json").write_text(json.dumps(scales))
    sweep = "[[latency]]\ninput_len = [8]\noutput_len = 2\n"
    (folder / "sweep.toml").write_text(f'config = "tiny"\nrecipes = ["auto", "fp8"]\n{sweep}')


def leaves(command, path):
    """Every command that can be run below this one, with the words that call it."""
    children = getattr(command, "commands", None)
    if not children:
        yield path
    for name, child in (children or {}).items():
        yield from leaves(child, f"{path} {name}")


ALL_COMMANDS = [path for row in COMMANDS for path in leaves(row.load(), row.name)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit code and printed text of every call, and of every command's help, without extras."""
    folder = tmp_path_factory.mktemp("plain")
    make_files(folder)
    lines = [f"{name} {args}".strip() for name, calls in CALLS.items() for args, _ in calls]
    lines += [f"{name} --help" for name in ALL_COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([optional_modules(), lines]),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(octavo.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, json.loads(done.stdout), strict=True))


def test_the_extras_are_refused():
    refused = set(optional_modules())
    assert {"transformers", "diffusers", "fastapi", "PIL", "plotly", "httpx"} <= refused
    assert refused.isdisjoint({"octavo", "torch", "numpy", "typer", "rich", "pydantic"})


def test_every_command_is_called():
    assert sorted(CALLS) == sorted(ALL_COMMANDS)


def test_nothing_is_called_a_bug(answers):
    for line, (code, text) in answers.items():
        assert "This is a bug" not in text and "Traceback" not in text, f"{line}: {text}"
        assert code in (0, 1), f"{line}: {code} {text}"


def test_help_needs_no_extra(answers):
    for name in ALL_COMMANDS:
        assert answers[f"{name} --help"][0] == 0


@pytest.mark.parametrize("name", CALLS)
def test_the_extra_is_named(answers, name):
    for args, extra in CALLS[name]:
        code, text = answers[f"{name} {args}".strip()]
        if extra is None:
            assert "not installed" not in text, text
        else:
            assert code == 1
            assert "not installed: pip install " in text and f"[{extra}]'" in text, text

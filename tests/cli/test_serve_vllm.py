"""octavo serve with vLLM's commands: what is carried over, and the way back for several GPUs."""

import shlex
import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")

from octavo.cli.main import COMMANDS, make_app, run
from octavo.recipe import Recipe

# Both commands of vLLM's guide to FP8 attention in vision encoders, without the words "vllm serve".
GUIDE = "MODEL --mm-encoder-attn-backend FLASHINFER --mm-encoder-attn-dtype fp8"
GUIDE_STATIC = f"{GUIDE} --mm-encoder-fp8-scale-path"


def octavo(*args):
    return run(make_app(COMMANDS), list(args))


@pytest.fixture
def calls(monkeypatch):
    """What the engine is called with, in place of running it."""
    found = SimpleNamespace()

    def load_engine(model, recipe, settings, **options):
        found.model, found.recipe, found.options = model, recipe, options
        return SimpleNamespace(
            model_name="some model", warm_up=lambda progress: None, precision="KV cache: FP8"
        )

    jobs = SimpleNamespace(warm_up=lambda: None)
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(jobs=jobs)))
    stubs = {
        "octavo.serving.engine.engine": {"load_engine": load_engine},
        "octavo.serving.server.app": {"create_app": lambda engine, settings: app},
    }
    for name, members in stubs.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("octavo.serving.server.run.run", lambda *args, **options: None)
    return found


def test_the_guides_command_runs_with_a_note(calls, capsys):
    assert octavo("serve", *GUIDE.split()) == 0
    assert calls.model == "MODEL"
    assert calls.recipe == Recipe(vision_attention="fp8")
    assert calls.options["vision_impl"] is None
    note = capsys.readouterr().err
    assert "octavo has no FLASHINFER backend and runs its own FP8 attention instead" in note


def test_the_guides_command_with_scales_runs(calls, tmp_path):
    scales = tmp_path / "scales.json"
    scales.write_text('{"visual.blocks.0.attn.attn": {"q": 224.0, "k": 198.0, "v": 210.0}}')
    assert octavo("serve", *GUIDE_STATIC.split(), str(scales)) == 0
    assert calls.recipe == Recipe(vision_attention={"scaling": "static"}, scales=str(scales))


def test_the_guides_benchmark_is_parsed(capsys, tmp_path):
    # Up to the images: a folder without one.
    args = f"--model {GUIDE} --mm-encoder-fp8-scale-save-path {tmp_path}/scales.json "
    args += f"--dataset-name hf --dataset-path {tmp_path} --num-prompts 100"
    assert octavo("bench", "mm-processor", *args.split()) == 1
    error = capsys.readouterr().err
    assert "runs its own FP8 attention instead" in error
    assert f"in the folder {tmp_path}, got none" in error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "--mm-encoder-attn-dtype fp8 --mm-encoder-attn-backend NOBODY",
            "one of gluon, triton, reference, or vLLM's FLASHINFER",
        ),
        # Without the dtype it would ask for BF16 attention of another library.
        ("--mm-encoder-attn-backend FLASHINFER", "expected that dtype for 'FLASHINFER'"),
    ],
    ids=["unknown", "no dtype"],
)
def test_other_backends_are_refused(calls, capsys, args, message):
    assert octavo("serve", *args.split()) == 1
    error = capsys.readouterr().err
    assert message in error and "instead" not in error


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-parallel-size 2",
        "--tensor-parallel-size=2",
        "-tp 2",
        "--pipeline-parallel-size 2",
        "-pp 2",
        "--data-parallel-size 4",
        "-dp 4",
        "--data-parallel-size-local 2",
        "--decode-context-parallel-size 2",
        "--enable-expert-parallel",
        "--distributed-executor-backend ray",
        "--nnodes 2 --node-rank 0",
        "--data-parallel-hybrid-lb",
        "--enable-eplb",
    ],
)
def test_several_gpus_are_answered_with_vllm(calls, capsys, flags):
    assert octavo("serve", "some/model", *flags.split(), "--kv-cache-dtype", "fp8") == 2
    error = capsys.readouterr().err
    assert "No such option" not in error
    given = flags.replace("=", " ")
    names = ", ".join(word for word in given.split() if word.startswith("-"))
    assert error.endswith(
        f"Error: octavo runs on one GPU and has no {names}; for several GPUs use vLLM: "
        f"vllm serve some/model {given} --kv-cache-dtype fp8\n"
    )
    assert not hasattr(calls, "model")


@pytest.mark.parametrize(
    ("args", "command", "left_out"),
    [
        ("-tp 2", "MODEL -tp 2", ""),
        ("--enforce-eager m -tp 2", "m --enforce-eager -tp 2", ""),
        ("--enable-expert-parallel m", "m --enable-expert-parallel", ""),
        ("m -tp 2 --num-pages 8 --compile", "m -tp 2", " (vLLM has no --num-pages, --compile)"),
        ("m -tp 2 --trust-remote-code --seed 3", "m -tp 2 --trust-remote-code --seed 3", ""),
        (
            "--served-model-name a --served-model-name 'b c' m -tp 2",
            "m --served-model-name a 'b c' -tp 2",
            "",
        ),
        (f"{GUIDE} -tp 2", f"{GUIDE} -tp 2", ""),
        (
            "m -tp 2 --mm-encoder-attn-backend gluon",
            "m -tp 2",
            " (vLLM has no --mm-encoder-attn-backend)",
        ),
    ],
    ids=str,
)
def test_the_vllm_command_has_what_vllm_has(capsys, args, command, left_out):
    assert octavo("serve", *shlex.split(args)) == 2
    assert f"use vLLM: vllm serve {command}{left_out}\n" in capsys.readouterr().err


def test_one_gpu_is_what_octavo_runs_on(calls):
    args = "m --tensor-parallel-size 1 -pp 1 --data-parallel-size=1 --max-num-seqs 3"
    assert octavo("serve", *args.split()) == 0
    assert calls.model == "m"


@pytest.mark.parametrize("flag", ["--tensor-size", "--tp"])
def test_other_unknown_flags_are_still_unknown(capsys, flag):
    assert octavo("serve", "m", flag, "1") == 2
    assert "No such option" in capsys.readouterr().err


def test_no_flag_of_ours_asks_for_several_gpus():
    from octavo.integrations.vllm_flags import PARALLEL, SHARED

    [serve] = [row.load() for row in COMMANDS if row.name == "serve"]
    own = {flag for p in serve.params for flag in (*p.opts, *p.secondary_opts)}
    assert not [flag for flag in own if PARALLEL.fullmatch(flag)]
    assert own >= SHARED - {"--chat-template"}

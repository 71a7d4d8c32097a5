"""octavo doctor on this machine."""

import importlib.metadata
import platform
import re
from importlib.metadata import version

import pytest
import torch

from octavo.cli.main import COMMANDS, make_app, run
from octavo.ops.select import OPS


def doctor(capsys):
    assert run(make_app(COMMANDS), ["doctor"]) == 0
    return capsys.readouterr().out


def test_names_versions_and_every_op(capsys):
    text = doctor(capsys)
    assert platform.python_version() in text
    assert version("torch") in text
    assert all(op in text for op in OPS)
    assert "plain torch runs on any device" in text


def test_says_what_was_run_on_a_gpu_and_what_was_only_compiled(capsys, monkeypatch):
    from octavo.measure.advise import gpus

    monkeypatch.setattr(gpus, "packages", lambda: {"torch": {"0.1": "gpu", "0.2": "compiled"}})
    text = " ".join(doctor(capsys).split())
    assert "what here run on a GPU run on a CPU only compiled only" in text
    assert f"torch {version('torch')} 0.1 0.2" in text
    assert "Hopper (sm_90): NVIDIA H200" in text and "Ada (sm_89), Blackwell (sm_100)" in text
    assert f"never tried with torch {version('torch')}; it was with 0.1 (run on a GPU)" in text


def test_a_gpu_that_octavo_never_ran_on(capsys, monkeypatch):
    from octavo.kernels import device

    l4 = device.Device("cuda", "NVIDIA L4", (8, 9), 58, 24 * 2**30)
    monkeypatch.setattr(device, "default_device", lambda: l4)
    text = " ".join(doctor(capsys).split())
    assert "octavo was never run on NVIDIA L4, nor on any other GPU of Ada (sm_89)" in text


def test_reports_a_misspelt_variable(capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_DEBUGG", "1")
    text = doctor(capsys)
    assert "OCTAVO_DEBUGG is set, but octavo has no such variable" in text


def test_reports_a_version_that_nobody_has_tried(capsys, monkeypatch):
    assert "octavo is tested with" not in doctor(capsys)
    installed = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "2.99.0" if name == "torch" else installed(name)
    )
    (warning,) = re.findall("warning: octavo is tested with.*", " ".join(doctor(capsys).split()))
    assert "torch 2.99.0 is installed" in warning and "pip install 'torch>=2.11,<2.16'" in warning


def test_says_which_gpu(capsys):
    text = doctor(capsys)
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name() in text
    else:
        assert "none that torch can use" in text


def octavo(*args):
    return run(make_app(COMMANDS), ["doctor", *map(str, args)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model that bears scales of 1.0, and one with an outlier among its keys."""
    pytest.importorskip("transformers")
    from octavo_testkit.models.text_models import make_decoder, save_decoder

    made = {}
    for name, factor in (("good", 1.0), ("bad", 5e4)):
        model = make_decoder("llama", vocab_size=258)
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[0] *= factor
        made[name] = save_decoder(
            tmp_path_factory.mktemp(name), model, has_bos=False, num_tokens=258
        )
    return made


def test_memory_of_a_context(capsys, folders):
    args = ("--context", "128k", "--gpu-memory", "1GiB", "--kv-cache-dtype-skip-layers", "0")
    assert octavo(folders["good"] / "config.json", *args, "--granularity", "token") == 0
    text = capsys.readouterr().out
    # Four layers of two heads of 16, in FP8 three of them, with a scale for each key and value.
    assert "131,072 tokens" in text and "512" in text and str(3 * 2 * 2 * (16 + 4) + 128) in text
    assert "sequences that fit in 1.0 GiB" in text and "e4m3, per token" in text
    assert "Decoding keeps queries" in text and "made for 1,024 tokens" in " ".join(text.split())


def test_a_model_that_breaks_at_one_ends_in_code_1(capsys, folders, tmp_path):
    assert octavo(folders["good"], "--kv", "--num-tokens", 40) == 0
    assert "Nothing saturates on these 40 tokens" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "text").write_text("A text of one's own.")
    assert octavo(folders["bad"], "--kv", "--data", tmp_path / "text") == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "break layers 1:" in text and "octavo calibrate" in text and "20 tokens" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--context", "128k"), "expected a MODEL with --context or --kv"),
        (("MODEL",), "expected a MODEL with --context or --kv"),
        (("MODEL", "--context", "many"), "such as 4096, 128k or 1M, got 'many'"),
        (("MODEL", "--context", "1k", "--gpu-memory", "much"), "got 'much'"),
        (("MODEL", "--context", "1k", "--data", "text"), "--data is for --kv"),
        (("MODEL", "--kv", "--gpu-memory", "1GB"), "for --context"),
        (("MODEL", "--context", "1k", "--kv-cache-dtype-skip-layers", "9"), "0-3"),
        (("MODEL", "--kv", "--data", "nowhere"), "expected a text file"),
    ],
)
def test_wrong_requests_are_one_sentence(capsys, folders, args, message):
    args = [str(folders["good"]) if arg == "MODEL" else arg for arg in args]
    assert octavo(*args) == 1
    assert message in " ".join(capsys.readouterr().err.split())

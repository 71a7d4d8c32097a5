"""octavo calibrate --pipeline, from prompts to a scale file that apply_ loads."""

import shlex

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import Recipe, apply_, load_scales
from octavo.cli.main import COMMANDS, make_app, run
from octavo.demo.small_image import (
    make_small_image_model,
    save_small_image_model,
)
from octavo.integrations.diffusers.load import load_pipeline
from octavo.measure.store import read
from octavo.numerics.error import relative_rms


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small image model whose blocks do something: new ones are the identity."""
    folder = tmp_path_factory.mktemp("small_image")
    model = make_small_image_model(["red", "cat"], num_single_layers=1, num_attention_heads=1)
    torch.manual_seed(0)
    for weight in model.transformer.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.05)
    save_small_image_model(model, folder)
    return folder


def calibrate(*args):
    return run(make_app(COMMANDS), ["calibrate", *map(str, args)])


STEPS = ("--num-inference-steps", "2")


def test_from_prompts_to_static_scales(folder, tmp_path, capsys):
    path, records = tmp_path / "s.json", tmp_path / "r.jsonl"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red cat\ncat\n")
    args = (folder, "--pipeline", "--prompts", prompts, "--scale-save-path", path, *STEPS)
    args += ("--weight-only-layers", "modulation", "--weight-only-layers", "to_out")
    assert calibrate(*args, "--attention", "--margin", "1.25", "-o", records) == 0
    shown = capsys.readouterr()
    assert "4/4" in shown.err
    for text in ("spread ×", "transformer.single_transformer_blocks.*.proj_mlp"):
        assert text in shown.out
    assert "and 2 of attention, 2 prompts of 2 steps, observer amax, margin 1.25" in shown.out
    scales = load_scales(path)
    assert (scales.header.kind, scales.header.model) == ("pipeline", str(folder))
    assert scales.inputs and not any("to_out" in name for name in scales.inputs)
    rows = read(records)
    assert len(rows) == len(scales.inputs) + 3 * len(scales.layers)
    assert all(row.values["spread"] >= 1 for row in rows)
    assert sorted(tmp_path.iterdir()) == sorted([prompts, path, records])

    command = shlex.split(rows[0].command)
    path.unlink()
    assert command[:2] == ["octavo", "calibrate"] and calibrate(*command[2:]) == 0
    again = load_scales(path)
    assert (again.inputs, again.layers) == (scales.inputs, scales.layers)

    pipe = load_pipeline(folder)
    options = {"num_inference_steps": 2, "output_type": "pt"}
    with torch.no_grad():
        plain = pipe("cat", generator=torch.Generator().manual_seed(5), **options).images
        static = {"scaling": "static"}
        patterns = {"weight_only_layers": ["modulation", "to_out"]}
        apply_(pipe, Recipe(linear=static, attention=static, scales=str(path), **patterns))
        found = pipe("cat", generator=torch.Generator().manual_seed(5), **options).images
    assert 0 < relative_rms(found, plain) < 0.1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "expected --prompt or --prompts with --pipeline, got neither"),
        (["--prompt", "cat", "--kv"], "expected --prompt or --prompts with --pipeline, got --kv"),
        (["--prompt", "cat", "--data", "x"], "with --pipeline, got --data"),
        (["--prompts", "gone.txt"], "expected a file of prompts, got none at gone.txt"),
        (["--prompt", "cat", "--call-options", "{"], "--call-options: expected a JSON object"),
        (["--prompt", "cat", "--call-options", "3"], "--call-options: expected a JSON object"),
        (["--prompt", "cat", "--margin", "0"], "margin: expected a number greater than 0"),
        (["--prompt", "cat", "-o", "gone/r.jsonl"], "expected an existing folder for gone"),
    ],
)
def test_requests_that_fail_before_the_model_is_loaded(
    tmp_path, capsys, monkeypatch, args, message
):
    monkeypatch.chdir(tmp_path)
    assert calibrate("no-such", "--pipeline", "--scale-save-path", "s.json", *args) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_words_that_the_model_does_not_know(folder, tmp_path, capsys):
    path = tmp_path / "s.json"
    args = (folder, "--pipeline", "--prompt", "red cta", "--scale-save-path", path, *STEPS)
    assert calibrate(*args) == 1
    assert "expected words that the model has learned, got 'cta'" in capsys.readouterr().err
    assert calibrate(*args[:-2], "--call-options", '{"guidance": 1}') == 1
    assert "guidance: expected an option of SmallImagePipeline" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_no_pipelines(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    args = ("--pipeline", "--prompt", "cat", "--scale-save-path", tmp_path / "s.json")
    assert calibrate(tmp_path / "empty", *args) == 1
    assert "model_index.json" in capsys.readouterr().err


def test_options_without_each_other(folder, tmp_path, capsys):
    path = tmp_path / "s.json"
    assert calibrate(folder, "--data", "x", "--scale-save-path", path, "--prompt", "cat") == 1
    assert "expected --pipeline with --prompt, got none" in capsys.readouterr().err
    assert calibrate(folder, "--scale-save-path", path) == 2
    assert calibrate(folder, "--data", "x") == 2
    assert calibrate(folder, "--pipeline", "--prompt", "cat") == 2


def test_which_layers_matter(folder, tmp_path, capsys):
    records = tmp_path / "r.jsonl"
    args = (folder, "--pipeline", "--prompt", "red cat", "--sensitivity", *STEPS)
    options = ("--weight-only-layers", "modulation", "--sensitivity-by", "group")
    options += ("--num-timesteps", "1", "--all", "-o", records)
    assert calibrate(*args, *options) == 0
    shown = capsys.readouterr()
    assert "2/2" in shown.err and "Error of the transformer's result" in shown.out
    assert "All layers in FP8 that are not kept" in shown.out
    rows = read(records)
    scanned = [row for row in rows if row.op == "sensitivity"]
    assert [row.case["layer"] for row in rows[-2:]] == ["all", "all but those proposed"]
    names = {row.case["layer"]: row for row in scanned}
    told = {"model": str(folder), "dtype": "bfloat16", "by": "group", "num_prompts": 1}
    told |= {"num_inference_steps": 2, "num_timesteps": 1}
    assert all(told.items() <= row.case.items() for row in rows)
    assert names["transformer.proj_out"].case["kept"] == "an output projection"
    alone = names["transformer.transformer_blocks.*.norm1.linear"].case
    assert (alone["is_weight_only"], alone["kept"]) == (True, "") and "weight-only" in shown.out
    assert names["transformer.transformer_blocks.*.ff.net.2"].case["kept"] == ""
    assert f"{len(scanned)}/{len(scanned)}" in shown.err
    errors = [row.values["error"] for row in scanned]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0
    assert sum(row.values["weight_share"] for row in scanned) == pytest.approx(1)
    assert shlex.split(rows[0].command)[-6:-2] == ["group", "--all", "--num-timesteps", "1"]


def test_a_layer_that_stands_out_is_proposed(folder, tmp_path, capsys):
    pipe = load_pipeline(folder, dtype=torch.float32)
    name = "transformer_blocks.0.ff.net"
    pipe.transformer.get_submodule(f"{name}.0.proj").bias.data[0] = 1e6
    pipe.transformer.get_submodule(f"{name}.2").weight.data[:, 0] = 0
    save_small_image_model(pipe, tmp_path / "planted")
    args = (tmp_path / "planted", "--pipeline", "--prompt", "red cat", "--sensitivity", *STEPS)
    options = ("--dtype", "float32", "--num-timesteps", "1", "--ignored-layers", "0-9")
    assert calibrate(*args, *options) == 1  # nothing is left to try
    assert "expected linear layers to quantize" in capsys.readouterr().err
    assert calibrate(*args, *options[:-1], "attn") == 0
    shown = capsys.readouterr().out
    assert f"--ignored-layers {name}.2" in shown.replace("\n", " ")


def test_options_of_sensitivity(capsys):
    assert calibrate("x", "--pipeline", "--prompt", "cat", "--all", "--scale-save-path", "s") == 1
    assert "expected --sensitivity with --all, got none" in capsys.readouterr().err
    args = ("x", "--pipeline", "--prompt", "cat", "--sensitivity", "--attention")
    assert calibrate(*args) == 1
    assert "expected --sensitivity without --attention" in capsys.readouterr().err
    for other in (("--margin", "2"), ("--observer", "mse"), ("--per-head",), ("--fresh",)):
        assert calibrate(*args[:-1], *other) == 1
        assert f"expected --sensitivity without {other[0]}:" in capsys.readouterr().err
    assert calibrate(*args[:-1], "--sensitivity-by", "model") == 2

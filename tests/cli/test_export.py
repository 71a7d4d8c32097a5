"""octavo export, from a model and a scale file to a folder with FP8 weights or scales in it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from octavo.calibration.scale_file import (
    LayerScales,
    ScaleFileWarning,
    ScaleSet,
    save_scales,
)
from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.checkpoints.kv_scales import read_kv_scales
from octavo_testkit.models.checkpoint_folders import LAYERS, weights, write
from octavo_testkit.models.fp8_folders import make_plain

SCALES = ScaleSet(dict.fromkeys(LAYERS, LayerScales(0.5, 0.25, 2.0)))


@pytest.fixture
def paths(tmp_path):
    save_scales(tmp_path / "scales.json", SCALES)
    return write(tmp_path / "model", weights()), tmp_path / "scales.json", tmp_path / "out"


def export(model, scales, out, *args):
    args = ["export", model, "--scales", scales, "-o", out, *args]
    return run(make_app(COMMANDS), [str(arg) for arg in args])


def test_from_a_scale_file_to_a_checkpoint(paths, capsys):
    assert export(*paths) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "scales of q, k and v per tensor for 2 layers, 4 files, 1 of them hard links" in said
    assert dict(read_kv_scales(paths[-1]).layers) == dict(SCALES.layers)


def test_scales_per_head(paths, capsys):
    save_scales(paths[1], ScaleSet(dict.fromkeys(LAYERS, LayerScales(None, (1, 2), (3, 4)))))
    assert export(*paths) == 0
    assert "scales of k and v per head" in " ".join(capsys.readouterr().out.split())


def test_modelopt_says_what_it_leaves_out(paths, capsys):
    assert export(*paths, "--format", "modelopt") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "scales of k and v per tensor" in said and "The scales of q are left out" in said
    assert (paths[-1] / "hf_quant_config.json").exists()


def test_what_is_missing_is_said(paths, capsys):
    model, scales, out = paths
    (model / "model.safetensors").unlink()
    assert export(*paths) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "expected weights in" in said and "got only 'config.json'" in said
    assert export(model, scales.with_name("gone.json"), out) == 1
    assert "gone.json" in capsys.readouterr().err
    assert not out.exists()


@pytest.fixture
def model(tmp_path):
    pytest.importorskip("transformers")
    make_plain().bfloat16().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def export_weights(model, *args):
    words = ["export", model, "-o", model.with_name("out"), *args]
    return run(make_app(COMMANDS), [str(word) for word in words])


def fp8_layers(folder):
    tensors = {n: x for path in folder.glob("*.safetensors") for n, x in load_file(path).items()}
    return {n.removesuffix(".weight") for n, x in tensors.items() if x.dtype == torch.float8_e4m3fn}


def test_weights_in_fp8(model, capsys):
    assert export_weights(model, "--quantization", "fp8") == 0
    shown = capsys.readouterr()
    said = " ".join(shown.out.split())
    out = model.with_name("out")
    assert f"{out}: 14 linear layers in FP8 (weights per channel, activations per token)" in said
    sizes = [
        sum(x.nbytes for x in load_file(f / "model.safetensors").values()) for f in (model, out)
    ]
    assert f"1 left alone, {sizes[0] / 1e3:.1f} kB -> {sizes[1] / 1e3:.1f} kB" in said
    assert said.endswith(f"serve it: vllm serve {out}")
    assert "quantizing layers" in shown.err and "14/14" in shown.err
    assert len(fp8_layers(out)) == 14


def test_weights_and_scales_with_ignored_layers(model, tmp_path, capsys):
    save_scales(tmp_path / "scales.json", SCALES)
    args = ["--scales", tmp_path / "scales.json", "--ignored-layers", "down_proj"]
    assert export_weights(model, "--quantization", "fp8", *args) == 0
    said = " ".join(capsys.readouterr().out.split())
    out = model.with_name("out")
    assert "12 linear layers in FP8" in said and "3 left alone" in said
    assert "with scales of q, k and v per tensor for 2 layers" in said
    assert said.endswith(f"serve it: vllm serve {out} --kv-cache-dtype fp8")
    assert dict(read_kv_scales(out).layers) == dict(SCALES.layers)
    found = fp8_layers(out)
    assert len(found) == 12 and not any("down_proj" in name for name in found)


def test_a_recipe_has_the_other_kinds(model, tmp_path, capsys):
    path = tmp_path / "recipe.toml"
    path.write_text('ignored_layers = ["self_attn"]\nlinear = {activation = "none"}\n')
    assert export_weights(model, "--recipe", path) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "6 linear layers in FP8 (weights per channel, activations in the model's dtype)" in said
    assert export_weights(model, "--recipe", path, "--quantization", "fp8") == 1
    assert "expected --recipe or the flags that fill one" in capsys.readouterr().err
    path.write_text('kv_cache = "fp8"\n')
    assert export_weights(model, "--recipe", path) == 1
    assert "linear layers alone, got none" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "expected --quantization fp8, --scales or --recipe, got none"),
        (["--quantization", "int8"], 1, "expected --quantization fp8, or none; got 'int8'"),
        (["--ignored-layers", "down_proj"], 1, "--ignored-layers needs --quantization fp8"),
        (["--quantization", "fp8", "--ignored-layers", "img_mlp"], 1, "img_mlp"),
        (["--quantization", "fp8", "--ignored-layers", "k_proj"], 1, "one product"),
        (
            ["--quantization", "fp8", "--format", "modelopt"],
            1,
            "expected --format compressed-tensors with FP8 weights, got modelopt",
        ),
    ],
)
def test_what_cannot_be_exported_is_said(args, code, said, model, capsys):
    assert export_weights(model, *args) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert list(model.parent.iterdir()) == [model]


def test_unknown_formats_are_wrong_usage(paths):
    assert export(*paths, "--format", "gguf") == 2


def test_strict_refuses_what_is_a_warning_otherwise(paths, capsys):
    model, scales, out = paths
    layers = SCALES.to_dict()["layers"]
    scales.write_text(json.dumps({"layers": {**layers, "other": {"q": 1.0}}, "by": "hand"}))
    assert export(*paths, "--strict") == 1 and not out.exists()
    assert "expected nothing beside layers, got 'by'" in " ".join(capsys.readouterr().err.split())
    with pytest.warns(ScaleFileWarning) as caught:  # and --strict is over with its command
        assert export(*paths) == 0
    said = " ".join(str(each.message) for each in caught)
    assert "keys beside layers: 'by'" in said and "incomplete entries of layers: 'other'" in said
    assert dict(read_kv_scales(out).layers) == dict(SCALES.layers)
    scales.write_text(json.dumps({LAYERS[0]: layers[LAYERS[0]], LAYERS[1]: {"q": 1.0}}))
    with pytest.warns(ScaleFileWarning, match=LAYERS[1]):
        assert export(model, scales, out.with_name("other")) == 1
    assert LAYERS[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["serve", "image", "export", "bench mm-processor", "bench throughput", "bench latency"]
    + [
        f"eval {n}"
        for n in (["chartqa", "perplexity", "needle", "mrcr", "choice", "math", "images"])
    ],
)
def test_every_command_that_reads_scale_files_can_be_strict(command, capsys):
    assert run(make_app(COMMANDS), [*command.split(), "--help"]) == 0
    assert "--strict" in capsys.readouterr().out

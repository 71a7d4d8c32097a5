"""octavo export, from a scale file to a folder with the scales in it."""

import json

import pytest

from octavo.calibration.scale_file import (
    LayerScales,
    ScaleFileWarning,
    ScaleSet,
    save_scales,
)
from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.checkpoints.kv_scales import read_kv_scales
from octavo_testkit.models.checkpoint_folders import LAYERS, weights, write

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

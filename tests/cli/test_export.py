"""octavo export, from a scale file to a folder with the scales in it."""

import sys
from pathlib import Path

import pytest

from octavo.calibration.scale_file import LayerScales, ScaleSet, save_scales
from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.checkpoints.kv_scales import read_kv_scales

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "checkpoints"))
from checkpoint_folders import LAYERS, weights, write  # noqa: E402

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

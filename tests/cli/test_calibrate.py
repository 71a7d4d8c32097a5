"""octavo calibrate, from images on disk to a scale file that apply_ loads."""

import html
import re
import shlex

import pytest
import torch

from octavo import Recipe, apply_, load_scales
from octavo.cli.main import COMMANDS, make_app, run
from octavo.numerics.error import relative_rms

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from octavo.integrations.transformers.calibrate import encode
from octavo_testkit.models import image_models


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    model = image_models.write_model(folder / "model")
    return model, image_models.write_images(folder / "images", 5)


def calibrate(*args):
    return run(make_app(COMMANDS), ["calibrate", *map(str, args)])


def test_from_images_to_static_scales(folders, tmp_path, capsys):
    model_folder, images = folders
    path, page = tmp_path / "s.json", tmp_path / "page.html"
    args = (model_folder, "--data", images, "--scale-save-path", path, "--plot", page)
    assert calibrate(*args, "--batch-size", "2", "--num-prompts", "4", "--margin", "1.25") == 0
    shown = capsys.readouterr()
    for text in (*image_models.LAYERS, "headroom", "SQNR", "2 layers, 4 prompts, observer amax"):
        assert text in shown.out
    assert "4/4" in shown.err
    scales = load_scales(path)
    assert list(scales.layers) == image_models.LAYERS
    header = scales.header
    assert (header.model, header.data) == (str(model_folder), str(images))
    assert (header.observer, header.passes, header.margin) == ("amax", 2, 1.25)
    assert "Signal to quantization noise" in page.read_text()
    assert sorted(tmp_path.iterdir()) == [page, path]

    model = image_models.make_model()
    inputs = image_models.make_processor()(
        images=image_models.make_images(2, seed=9), return_tensors="pt"
    )
    with torch.inference_mode():
        expected = torch.cat(list(encode(model, inputs).pooler_output))
        apply_(model, Recipe(vision_attention={"scaling": "static"}, scales=str(path)))
        found = torch.cat(list(encode(model, inputs).pooler_output))
    assert 0 < relative_rms(found, expected) < 0.05


def test_the_command_of_a_report_finds_the_same_scales(folders, tmp_path, capsys):
    model, images = folders
    path, page = tmp_path / "s.json", tmp_path / "page.html"
    args = ("--data", images, "--scale-save-path", path, "--num-prompts", "3", "--plot", page)
    options = ("--dtype", "float32", "--hf-split", "test", "--hf-subset", "en", "--device", "cpu")
    assert calibrate(model, *args, *options, "--batch-size", "2") == 0
    text = html.unescape(page.read_text())
    command = re.search(r"octavo calibrate .*?--num-prompts 3", text).group()
    for option in ("--dtype float32", "--hf-split test", "--hf-subset en", "--batch-size 2"):
        assert option in command
    first = load_scales(path)
    path.unlink()
    assert calibrate(*shlex.split(command)[2:]) == 0
    assert load_scales(path).layers == first.layers
    capsys.readouterr()
    assert calibrate(model, *args) == 0
    assert load_scales(path).layers != first.layers  # of another dtype
    assert "--dtype" not in html.unescape(page.read_text())


def test_per_head_by_percentile(folders, tmp_path, capsys):
    model_folder, images = folders
    path = tmp_path / "s.json"
    args = (model_folder, "--data", images, "--scale-save-path", path, "--per-head")
    assert calibrate(*args, "--observer", "percentile", "--percentile", "99") == 0
    scales = load_scales(path)
    assert scales.header.observer == "percentile 99"
    assert all(len(layer.q) == 2 for layer in scales.layers.values())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--margin", "0"], "margin: expected a number greater than 0"),
        (
            ["--observer", "percentile", "--percentile", "0"],
            "percentile: expected a number greater than 0",
        ),
        (["--percentile", "99"], "expected --observer percentile with --percentile, got amax"),
        (["--scale-save-path", "gone/s.json"], "expected an existing folder for gone/s.json"),
        (["--plot", "gone/page.html"], "expected an existing folder for gone/page.html"),
        (["--data", "gone.jsonl"], "expected a file of images, got none at gone.jsonl"),
    ],
)
def test_requests_that_fail_before_the_model_is_loaded(
    folders, tmp_path, capsys, monkeypatch, args, message
):
    monkeypatch.chdir(tmp_path)
    given = ("no-such-model", "--data", folders[1], "--scale-save-path", tmp_path / "s.json")
    assert calibrate(*given, *args) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_image_is_named(folders, tmp_path, capsys):
    images = image_models.write_images(tmp_path / "images", 2)
    (images / "001.png").write_bytes(b"no image")
    path = tmp_path / "s.json"
    assert calibrate(folders[0], "--data", images, "--scale-save-path", path) == 1
    assert "001.png: expected an image" in capsys.readouterr().err
    assert not path.exists()


def test_an_observer_that_does_not_exist_is_wrong_usage(folders, tmp_path, capsys):
    path = tmp_path / "s.json"
    args = (folders[0], "--data", folders[1], "--scale-save-path", path, "--observer", "mean")
    assert calibrate(*args) == 2


def test_help_names_what_it_needs(capsys):
    assert calibrate("--help") == 0
    shown = capsys.readouterr().out
    for option in ("--data", "--scale-save-path", "--observer", "--fresh", "--num-prompts"):
        assert option in shown


def test_a_chart_reader_needs_no_processor(folders, tmp_path, capsys):
    from octavo.demo.chart_reader import make_chart_reader, save_chart_reader

    reader, path = tmp_path / "reader", tmp_path / "s.json"
    save_chart_reader(make_chart_reader(["How", "many"]), reader)
    assert calibrate(reader, "--data", folders[1], "--scale-save-path", path) == 0
    scales = load_scales(path)
    assert list(scales.layers) == [f"visual.blocks.{i}.attn.attn" for i in range(6)]
    assert scales.header.passes == 5 and "6 layers, 5 prompts" in capsys.readouterr().out

"""octavo image, from flags to files: with a small image model of random weights."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from PIL import Image

from octavo.cli.main import COMMANDS, make_app, run
from octavo.errors import ConfigError
from octavo.integrations.diffusers import image_files
from octavo.integrations.diffusers.step_cache import use_step_cache_
from octavo.measure.evaluate.image_scores import (
    BETWEEN,
    CAPTION,
    draw_side_by_side,
    score_images,
)
from octavo.recipe import Recipe
from octavo.serving.engine.omni import Omni
from octavo_testkit.models.tiny_pipelines import write_pipeline
from octavo_testkit.models.tiny_small_image import write_small_image


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_small_image(tmp_path_factory.mktemp("small"))


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def octavo(*args):
    return run(make_app(COMMANDS), ["image", *map(str, args)])


def draw(small, *args):
    return octavo("--model", small, "--num-inference-steps", 2, "--device", "cpu", *args)


def opened(path):
    with Image.open(path) as image:
        image.load()
        return image


def said(captured):
    return " ".join(captured.split())


def test_one_picture_says_how_it_was_made(small, capsys):
    args = ("--prompt", "cat", "--quantization", "fp8", "--ignored-layers", "to_q", "--seed", 7)
    args += ("--weight-only-layers", "modulation")
    assert draw(small, *args, "--guidance-scale", 2) == 0
    texts = opened("out.png").text
    assert (texts["prompt"], texts["seed"], texts["model"]) == ("cat", "7", str(small))
    assert json.loads(texts["options"]) == {"guidance_scale": 2.0, "num_inference_steps": 2}
    assert texts["dtype"] == "bfloat16"
    recipe = Recipe.from_json(texts["recipe"])
    patterns = {"ignored_layers": ["to_q"], "weight_only_layers": ["modulation"]}
    assert recipe == Recipe(linear="fp8", **patterns)
    printed = capsys.readouterr()
    assert "out.png: 'cat', seed 7, 2 steps" in said(printed.out)
    assert "transformer.linear: 18 layers, 3 of them weight-only" in said(printed.err)
    first = Path("out.png").read_bytes()
    assert draw(small, *args, "--guidance-scale", 2, "--force") == 0
    assert Path("out.png").read_bytes() == first


def test_several_pictures_have_numbers_and_replace_nothing(small, tmp_path, capsys):
    args = ("-p", "cat", "-p", "dog", "-n", 2, "-o", tmp_path / "a.png", "--seed", 1)
    assert draw(small, *args) == 0
    files = [tmp_path / f"a-{index}.png" for index in range(4)]
    assert sorted(tmp_path.iterdir()) == files
    texts = [opened(file).text for file in files]
    found = [(text["prompt"], text["seed"]) for text in texts]
    assert found == [("cat", "1"), ("cat", "2"), ("dog", "1"), ("dog", "2")]
    before = files[3].stat().st_mtime_ns
    files[0].unlink()
    assert draw(small, *args) == 1
    assert "a-1.png'" in said(capsys.readouterr().err) and not files[0].exists()
    assert files[3].stat().st_mtime_ns == before


def test_compare(small, capsys):
    assert draw(small, "-p", "cat", "--quantization", "fp8", "--compare", "bf16") == 0
    panels = opened("out-compare.png")
    zoom = 6  # 48 pixels become 288
    assert panels.size == (3 * 48 * zoom + 2 * BETWEEN, 48 * zoom + CAPTION)
    printed = capsys.readouterr()
    assert "out-compare.png: PSNR" in said(printed.out) and "SSIM" in said(printed.out)
    assert "times as fast" in said(printed.out) and "FP8" in said(printed.out)
    assert said(printed.err).count("LPIPS") == 1
    assert "on a CPU FP8 is emulated" in said(printed.err)
    assert draw(small, "-p", "cat", "--quantization", "fp8", "--compare", "bf16") == 1
    fp8 = opened("out.png").convert("RGB")
    left, side = 48 * zoom + BETWEEN, 48 * zoom
    panel = panels.crop((left, CAPTION, left + side, CAPTION + side))
    assert panel.resize((48, 48), Image.Resampling.NEAREST).tobytes() == fp8.tobytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ignored-layers", "img_mlp"), "img_mlp"),
        (("--cache-backend", "tea_cache"), "coefficients"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_drawn(
    small, monkeypatch, capsys, flags, message
):
    monkeypatch.setattr("octavo.serving.engine.omni.Omni.generate", None)
    assert draw(small, "-p", "cat", "--quantization", "fp8", "--compare", "bf16", *flags) == 1
    assert message in said(capsys.readouterr().err)


def test_a_pipeline_in_fp8_is_nothing_to_compare_with(small, tmp_path, monkeypatch, capsys):
    omni = Omni(small, quantization="fp8", device="cpu")
    monkeypatch.setattr("octavo.serving.engine.omni.load_pipeline", lambda *_: omni.pipe)
    assert draw(small, "-p", "cat", "--attention", "fp8", "--compare", "bf16") == 1
    assert "expected a pipeline with plain linear layers" in said(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_side_by_side_shows_and_scores_a_difference():
    first, second = Image.new("RGB", (300, 20), (10, 0, 0)), Image.new("RGB", (300, 20))
    panels = draw_side_by_side(first, second, ("BF16", "FP8 " * 200))
    assert panels.size == (912, 44)
    colors = [panels.getpixel((x, 30)) for x in (100, 400, 700)]
    assert colors == [(10, 0, 0), (0, 0, 0), (80, 0, 0)]
    assert panels.getpixel((303, 30)) == (255, 255, 255)
    scores = score_images([first, first], [second, first])
    assert scores.psnr_db[0] == pytest.approx(32.9, abs=0.01)  # 10 of 255 in one color of three
    assert scores.psnr_db[1] == 100.0 and scores.ssim[1] == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="images of one size"):
        score_images([first, Image.new("RGB", (2, 2))], [first, first])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected a --prompt"),
        (("-p", "horse"), "expected words that the model has learned"),
        (("-p", "cat", "--quantization", "int8"), "expected --quantization fp8, or none"),
        (("-p", "cat", "--ignored-layers", "x"), "--ignored-layers needs --quantization fp8"),
        (("-p", "cat", "--weight-only-layers", "x"), "-layers needs --quantization fp8"),
        (("-p", "cat", "--scale-path", "x"), "--scale-path needs --quantization fp8"),
        (("-p", "cat", "--quantization", "fp8", "--ignored-layers", "img_mlp"), "img_mlp"),
        (("-p", "cat", "--quantization-config", "{"), "expected a JSON object"),
        (("-p", "cat", "--quantization-config", "[]"), "expected a JSON object, got []"),
        (("-p", "cat", "--cache-config", "{}"), "expected a --cache-backend with it"),
        (("-p", "cat", "--negative-prompt", "dog"), "negative_prompt: expected an option of"),
        (("-p", "cat", "--extra-args", '{"sigma": 1}'), "sigma: expected an option of"),
        (("-p", "cat", "--compare", "bf16"), "something to compare it with"),
        (("-p", "cat", "--compare", "fp32"), "expected --compare bf16"),
        (("-p", "cat", "-n", "0"), "num_images_per_prompt"),
        (("-p", "cat", "-o", "a.jpg"), "expected an output that ends in .png"),
        (("-p", "cat", "-o", "no/such/a.png"), "expected an existing folder"),
        (("-p", "cat", "--fps", "0"), "--fps above 0"),
        (("-p", "cat", "--recipe", "r.toml", "--attention", "fp8"), "got both"),
    ],
)
def test_what_cannot_be_drawn_is_said_and_leaves_nothing(small, tmp_path, capsys, args, message):
    assert draw(small, *args) == 1
    assert message in said(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_flags_reach_omni(small, monkeypatch, tmp_path, capsys):
    found = []

    def use(pipe, *words):
        found.append(words)
        return use_step_cache_(pipe, *words)

    monkeypatch.setattr("octavo.serving.engine.omni.use_step_cache_", use)
    Recipe(attention={"granularity": "head"}).save(tmp_path / "r.toml")
    cache = ("--cache-backend", "first_block_cache", "--cache-config", '{"threshold": 0.2}')
    assert draw(small, "-p", "cat", "--recipe", "r.toml", *cache) == 0
    assert found == [("first_block_cache", {"threshold": 0.2})]
    assert "of 2 steps skipped" in said(capsys.readouterr().err)
    texts = opened("out.png").text
    assert json.loads(texts["cache"]) == {"backend": "first_block_cache", "threshold": 0.2}
    assert "granularity" in texts["recipe"]


def test_help_teaches(capsys):
    assert octavo("--help") == 0
    shown = said(capsys.readouterr().out)
    for word in ("--quantization", "--compare", "--cache-backend", "img_mlp", "octavo image"):
        assert word in shown


FRAMES = [Image.new("RGB", (16, 16), (index * 40, 0, 0)) for index in range(3)]


def test_videos_as_gif_folder_and_mp4(tmp_path, monkeypatch):
    image_files.write_video(FRAMES, tmp_path / "a.gif", 10)
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 3 and gif.info["duration"] == 100
    image_files.write_video(FRAMES, tmp_path / "frames", 10)
    names = [f"frame-{index:04d}.png" for index in range(3)]
    assert sorted(path.name for path in (tmp_path / "frames").iterdir()) == names
    written = []

    def export_to_video(frames, path, fps, macro_block_size):
        written.append((len(frames), fps, macro_block_size))
        Path(path).write_bytes(b"video")

    monkeypatch.setattr("diffusers.utils.export_to_video", export_to_video)
    image_files.write_video(FRAMES, tmp_path / "a.mp4", 23.976)
    assert written == [(3, 23.976, 2)] and (tmp_path / "a.mp4").read_bytes() == b"video"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gif", "a.mp4", "frames"]


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError("no space left")

    monkeypatch.setattr(image_files, "write_atomically", full)
    with pytest.raises(OSError, match="no space left"):
        image_files.write_video(FRAMES, tmp_path / "frames", 10)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission_is_said_before_anything_is_drawn(small, monkeypatch, capsys):
    monkeypatch.setattr(image_files.os, "access", lambda path, mode: False)
    monkeypatch.setattr("octavo.serving.engine.omni.Omni.generate", None)
    assert draw(small, "-p", "cat") == 1
    assert "expected a folder for out.png that can be written to" in said(capsys.readouterr().err)


@pytest.mark.parametrize("has_writer", [False, True])
def test_mp4_needs_a_writer(tmp_path, monkeypatch, has_writer):
    known = {"imageio", "imageio_ffmpeg"} if has_writer else {"imageio"}
    monkeypatch.setattr(image_files, "find_spec", lambda name: name in known or None)
    options = {"is_video": True, "is_forced": False}
    if has_writer:
        assert image_files.target_files(tmp_path / "a.mp4", 1, **options) == [tmp_path / "a.mp4"]
    else:
        with pytest.raises(image_files.UnsupportedError, match="pip install imageio"):
            image_files.target_files(tmp_path / "a.mp4", 1, **options)
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="expected files or nothing"):
        image_files.target_files(tmp_path / "b", 1, is_video=True, is_forced=True)


@pytest.mark.slow
def test_a_video_without_a_name_says_where_it_goes(tmp_path, capsys):
    write_pipeline("wan", tmp_path / "wan")
    size = ("--height", 16, "--width", 16, "--num-frames", 9)
    extra = ("--extra-args", '{"max_sequence_length": 32}')
    assert draw(tmp_path / "wan", "-p", "a cat", *size, *extra) == 1
    assert "extra_args: expected names of no other field" in said(capsys.readouterr().err)
    extra = ("--extra-args", '{"guidance_scale_2": 2.0}', "--max-sequence-length", 32)
    compare = ("--quantization", "fp8", "--compare", "bf16")
    assert draw(tmp_path / "wan", "-p", "a cat", *size, *extra, *compare) == 0
    assert "the video goes to out." in said(capsys.readouterr().err)
    (video,) = (path for path in tmp_path.glob("out.*"))
    assert video.stat().st_size and (tmp_path / "out-compare.png").exists()

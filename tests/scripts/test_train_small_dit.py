"""The small image model's training and its pictures: a run that goes on where it stopped."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.measure import store

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
pytest.importorskip("PIL")

from PIL import Image, ImageFont

from octavo.demo.small_image import (
    MAX_WORDS,
    WordEncoder,
    load_small_image_model,
)
from octavo.demo.small_image_training import COLORS, prompt, vocabulary

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    yield load_script("train_small_dit")
    del sys.modules["train_small_dit"]


@pytest.fixture(scope="module")
def drawing():
    yield load_script("draw_emoji")
    del sys.modules["draw_emoji"]


@pytest.fixture
def arguments(tmp_path):
    """Those of a run of a few seconds, on three pictures."""
    sprites = np.random.default_rng(0).integers(0, 256, (3, 2, 48, 48, 4), np.uint8)
    names, sizes = np.array(["red dot", "dot", "line"]), np.array(["large", "small"])
    data = tmp_path / "pictures.npz"
    np.savez(data, sprites=sprites, names=names, sizes=sizes, can_flip=np.array([True] * 3))
    flags = {"--data": data, "--state": tmp_path / "state", "--output": tmp_path / "model"}
    flags |= {"--batch": 2, "--steps": 2, "--eval-pictures": 2, "--device": "cpu"}
    flags |= {"--final-pictures": 2}
    return ["--tiny", *(str(part) for pair in flags.items() for part in pair)]


def test_a_run_writes_a_model_and_goes_on_where_it_stopped(script, arguments, tmp_path):
    run = script.train(script.parse(arguments))
    record = script.finish(run)
    assert run.step == 2 and set(record.values) >= {"recognized", "psnr_db", "weights_bytes"}
    model = load_small_image_model(tmp_path / "model", torch.float32)
    kept = run.average.transformer.proj_out.weight
    assert torch.equal(model.transformer.proj_out.weight, kept.bfloat16().float())
    assert not torch.equal(kept, run.model.transformer.proj_out.weight)  # an average of steps
    with Image.open(tmp_path / "state" / "contact_sheet.png") as sheet:
        assert sheet.size == (2 * 144, 144 + 14)
    assert model.generate(["small red dot on blue"], 1).shape == (1, 48, 48, 3)

    again = script.Run(script.parse([*arguments, "--steps", "3"]))
    assert again.step == 2 and again.seconds == pytest.approx(run.seconds)
    assert torch.equal(again.average.transformer.proj_out.weight, kept)
    state = again.optimizer.state[again.parameters[0]]
    assert int(state["step"]) == 2 and again.optimizer.param_groups[0]["lr"] is again.learning_rate
    assert script.train(script.parse([*arguments, "--steps", "3"])).step == 3
    steps = [int(r.case["step"]) for r in store.read(tmp_path / "state" / "progress.jsonl")]
    assert steps == [2, 3]

    other = [*arguments, "--state", str(tmp_path / "other"), "--start", str(tmp_path / "model")]
    started = script.Run(script.parse(other))
    assert started.step == 0
    weight = started.model.transformer.proj_out.weight
    assert torch.equal(weight, model.transformer.proj_out.weight) and weight.any()
    with pytest.raises(ConfigError, match="same pictures"):
        script.Run(script.parse([*other, "--names", "2"]))


def test_a_step_moves_weights_and_then_their_average(script, arguments):
    run = script.Run(script.parse([*arguments, "--steps", "1000"]))
    before = run.model.transformer.proj_out.weight.clone()
    losses = [float(run.learn()) for _ in range(3)]
    assert all(0.3 < loss < 3 for loss in losses)
    now, average = run.model.transformer.proj_out.weight, run.average.transformer.proj_out.weight
    assert not torch.equal(now, before)
    assert 0 < (average - before).norm() < (now - before).norm()
    assert 0 < float(run.learning_rate) < run.settings.learning_rate  # still warming up


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # autocast's norms
def test_a_cuda_graph_learns_from_new_pictures_in_each_step(script, arguments):
    run = script.Run(script.parse([*arguments, "--steps", "1000", "--device", "cuda"]))
    losses = [float(run.learn()) for _ in range(6)]
    assert run.graph is not None and len(set(losses)) == 6
    assert all(0.3 < loss < 3 for loss in losses)
    now, average = run.model.transformer.proj_out.weight, run.average.transformer.proj_out.weight
    assert 0 < average.norm() < now.norm()
    eager = script.Run(script.parse([*arguments, "--device", "cuda", "--eager"]))
    assert 0.3 < float(eager.learn()) < 3 and eager.graph is None


def test_missing_pictures_are_named(script, tmp_path):
    with pytest.raises(ConfigError, match="draw_emoji.py"):
        script.read_data(tmp_path / "none.npz", None)


def test_every_emoji_has_a_name_that_fits_in_a_prompt(drawing):
    names = drawing.parse_names()
    listed = [item for item in drawing.NAMES.replace("\n", ",").split(",") if item.strip()]
    assert len(names) == len(listed) == len(set(names.values())) >= 200
    words = WordEncoder(words=vocabulary(list(names), list(drawing.SPRITE_SIZES)))
    prompts = [prompt(name, "small", "blue") for name in names]
    rows = {tuple(words.encode(text)) for text in prompts}
    assert len(rows) == len(names) and all(len(row) == MAX_WORDS for row in rows)
    assert names.keys() >= drawing.ONE_WAY and len(COLORS) % 7  # held-out colors differ by name


def test_a_sprite_fills_the_middle_of_its_canvas(drawing):
    font = ImageFont.load_default(drawing.FONT_SIZE)
    for size in drawing.SPRITE_SIZES.values():
        sprite = drawing.draw(font, "H", size)
        assert sprite.shape == (48, 48, 4) and sprite.dtype == np.uint8
        rows, columns = np.nonzero(sprite[..., 3])
        assert rows.max() - rows.min() + 1 == size > columns.max() - columns.min()
        assert abs(rows.max() + rows.min() - 47) <= 1
        assert abs(columns.max() + columns.min() - 47) <= 2
    with pytest.raises(ConfigError, match="got nothing"):
        drawing.draw(font, " ", 40)
    with pytest.raises(ConfigError, match="see --help"):
        drawing.draw_all(Path("no_font.ttf"), {"cat": "x"})

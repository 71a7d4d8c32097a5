"""The evaluation of pictures, by pipelines that draw what they are told."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo import Recipe, quantize_
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.changes import Changes
from octavo.measure.evaluate import images
from octavo.measure.evaluate.image_requests import ImageRequest
from octavo.measure.evaluate.image_scores import ImageScores
from octavo.measure.evaluate.images import (
    ImageJob,
    draw,
    evaluate,
    images_table,
    make_job,
    parse_image_rows,
    read_prompts,
    rows_below,
)
from octavo.measure.rows import Row

pytest.importorskip("diffusers")
SCRIPTS = Path(__file__).parents[3] / "scripts"
ROWS = [Row.of("bf16", None), Row.of("fp8", Recipe(linear="fp8"))]
JOB = ImageJob(model="m", dtype="bfloat16", prompts=("dog", "cat"), seed=5)


class Pipe:
    """Draws noise of its generator; once quantized, with an error that grows with the seed."""

    device = torch.device("cpu")
    components = {}

    def __init__(self, result="images", shape=(1, 3, 16, 24)):
        self.result, self.shape, self.error, self.calls = result, shape, 0.0, []

    def __call__(
        self, prompt, num_inference_steps=7, generator=None, output_type="pil", height=None
    ):
        assert output_type == "pt"
        seed = generator.initial_seed()
        self.calls.append((prompt, num_inference_steps, seed, height))
        picture = torch.rand(self.shape, generator=generator) / 2 + self.error * (seed - 4)
        return SimpleNamespace(**{self.result: picture})


@pytest.fixture
def made(monkeypatch):
    """The pipelines that were made; apply_ gives them an error of 0.01."""

    def apply(pipe, recipe):
        pipe.error = 0.01
        return Changes({"transformer.linear": ["a", "b"], "text_encoder.linear": ["c"]})

    monkeypatch.setattr(images, "apply_", apply)
    monkeypatch.setattr(images.gc, "collect", lambda: 0)  # takes its time after many tests
    return []


def run(made, rows=ROWS, job=JOB, make=Pipe, **options):
    def make_pipeline():
        made.append(make())
        return made[-1]

    return evaluate(make_pipeline, rows, job, command="c", lpips=False, **options)


def test_each_row_is_compared_with_the_first(made):
    plain, fp8 = run(made)
    assert len(made) == 2 and made[0].error == 0 and made[1].error == 0.01
    assert made[0].calls == made[1].calls == [("dog", 7, 5, None), ("cat", 7, 6, None)]
    assert plain.values == {} and plain.baseline is None and fp8.baseline == "bf16"
    # Errors of 0.01 and 0.02.
    assert fp8.values["worst_psnr_db"] == pytest.approx(-20 * math.log10(0.02), abs=1e-3)
    mean = (-20 * math.log10(0.02) + 40) / 2
    assert fp8.values["psnr_db"] == pytest.approx(mean, abs=1e-3)
    assert fp8.values["worst_ssim"] < fp8.values["ssim"] < 1
    assert "lpips" not in fp8.values and "clip_score" not in fp8.values


def test_later_rows_are_compared_with_the_first_too(made):
    rows = [*ROWS, replace(ROWS[1], name="fp8+ignore=ff")]
    _, second, third = run(made, rows)
    assert third.baseline == "bf16" and third.values == second.values


def test_a_record_says_what_was_drawn(made):
    job = ImageJob(
        model="m",
        dtype="bfloat16",
        prompts=("dog",),
        seed=8,
        num_inference_steps=2,
        options={"height": 16},
    )
    plain, fp8 = run(made, job=job)
    expected = {
        "model": "m",
        "pipeline": "Pipe",
        "dtype": "bfloat16",
        "num_pictures": 1,
        "num_inference_steps": 2,
        "seed": 8,
        "prompts_sha256": job.about["prompts_sha256"],
        "height": 16,
        "width": 24,
    }
    assert fp8.case == {**expected, "row": "fp8", "num_linear": 3, "num_attention": 0}
    assert plain.case["num_linear"] == 0 and fp8.op == "images" and fp8.command == "c"
    assert made[0].calls == [("dog", 2, 8, 16)]
    other = ImageJob(model="m", dtype="bfloat16", prompts=("cat",))
    digest = job.about["prompts_sha256"]
    assert digest != other.about["prompts_sha256"] and len(digest) == 16
    json.loads(fp8.to_json())


def test_every_frame_of_a_video_counts(made):
    seen = []
    _, fp8 = run(
        made,
        make=lambda: Pipe("frames", (1, 4, 3, 16, 16)),
        on_row=lambda rows: seen.append([tuple(x.shape) for x in rows[-1][1]]) or {},
    )
    assert seen == [[(4, 3, 16, 16)] * 2] * 2
    assert fp8.case["num_frames"] == 4 and fp8.case["num_pictures"] == 2


class Scorer:
    name = "made up"

    def score(self, pictures, prompts):
        assert len(pictures) == len(prompts)
        return [len(prompt) * 10.0 for prompt in prompts]


def test_a_scorer_sees_every_row_with_its_prompts(made):
    job = ImageJob(model="m", dtype="bfloat16", prompts=("dog", "tiger"), seed=5)
    records = run(made, job=job, scorer=Scorer())
    for record in records:
        assert record.case["clip_model"] == "made up"
        assert record.values["clip_score"] == 40.0 and record.values["worst_clip_score"] == 30.0


def test_progress_is_told(made):
    names = []
    run(made, on_image=names.append)
    assert names == ["bf16", "bf16", "fp8", "fp8"]


def test_lpips_is_in_the_record_where_it_is_taken(made, monkeypatch):
    scores = ImageScores((30.0, 40.0), (0.9, 0.8), (0.1, 0.3))
    monkeypatch.setattr(images, "compare_images", lambda a, b, lpips: scores)
    values = run(made)[1].values
    assert values["lpips"] == 0.2 and values["worst_lpips"] == 0.3
    assert values["worst_psnr_db"] == 30.0 and values["worst_ssim"] == 0.8


def test_pictures_that_are_not_finite_name_their_row(made, monkeypatch):
    def break_(pipe, recipe):
        pipe.error = math.nan
        return Changes({})

    monkeypatch.setattr(images, "apply_", break_)
    with pytest.raises(ConfigError, match="row fp8: expected finite images"):
        run(made)


def test_what_a_pipeline_cannot_do_raises():
    with pytest.raises(UnsupportedError, match="width: expected an option of Pipe"):
        draw(Pipe(), ImageJob(model="m", dtype="d", prompts=("dog",), options={"width": 8}))
    with pytest.raises(ConfigError, match=r"got \[1, 16, 16\]"):
        draw(Pipe(shape=(1, 16, 16)), JOB)
    with pytest.raises(ConfigError, match="got NoneType"):
        draw(Pipe("sounds"), JOB)
    with pytest.raises(ConfigError, match="expected a prompt"):
        ImageJob(model="m", dtype="d", prompts=())

    class Vague(Pipe):
        def __call__(self, prompt, num_inference_steps=None, **options):
            raise AssertionError

    with pytest.raises(ConfigError, match="num_inference_steps from 1 on, got None"):
        draw(Vague(), JOB)

    class Strict(Pipe):
        def __call__(self, prompt, num_inference_steps=1, **options):
            raise ValueError("height and width have to be divisible by 8")

    with pytest.raises(ConfigError, match="Strict: height and width have to be divisible by 8"):
        draw(Strict(), JOB)


def test_guidance_that_a_pipeline_would_ignore_raises():
    class Guided(Pipe):
        transformer = SimpleNamespace(config={"guidance_embeds": False})

        def __call__(self, prompt, num_inference_steps=1, guidance_scale=1, true_cfg_scale=1):
            raise AssertionError

    job = ImageJob(model="m", dtype="d", prompts=("dog",), options={"guidance_scale": 3.0})
    with pytest.raises(ConfigError, match="guidance_scale: .* would ignore it"):
        draw(Guided(), job)


def test_a_plain_row_of_a_pipeline_in_fp8_raises(made):
    class Quantized(Pipe):
        components = {"transformer": torch.nn.Sequential(torch.nn.Linear(16, 16))}

    quantize_(Quantized.components["transformer"])
    with pytest.raises(ConfigError, match="row bf16: .* got 1 in FP8, such as transformer.0"):
        run(made, make=Quantized)
    assert made[0].calls == []


def test_lpips_that_must_be_there_raises_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr("octavo.measure.evaluate.image_scores.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install lpips"):
        evaluate(None, ROWS, JOB, command="c", lpips=True)


def test_the_gate_names_rows_below_it(made):
    records = run(made)
    assert rows_below(records, 30) == []
    (sentence,) = rows_below(records, 38)
    assert "row fp8" in sentence and "38 dB or more against bf16, got 36.99 dB" in sentence


def test_the_table_has_the_scores_that_were_taken(made):
    table = images_table(run(made))
    assert table.header == ("row", "PSNR (dB)", "worst PSNR (dB)", "SSIM", "worst SSIM")
    assert [row[0] for row in table.rows] == ["bf16", "fp8"] and table.rows[0][1] is None
    assert "2 images of 24 × 16, 7 steps, against bf16" in table.caption


def test_prompts_of_a_file(tmp_path):
    (tmp_path / "p.txt").write_text("a dog\n\n  a cat \n")
    assert read_prompts(tmp_path / "p.txt") == ("a dog", "a cat")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="expected a prompt in each line"):
        read_prompts(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="expected prompts in UTF-8"):
        read_prompts(tmp_path / "latin.txt")


def test_prompts_serve_again():
    def prompts(num_pictures):
        return make_job(ImageRequest(prompt=("a", "b"), num_pictures=num_pictures)).prompts

    assert prompts(None) == ("a", "b") and prompts(1) == ("a",)
    assert prompts(5) == ("a", "b", "a", "b", "a")
    with pytest.raises(ConfigError, match="--num-pictures of 1 or more, got 0"):
        prompts(0)


def test_the_small_image_model_knows_its_prompts():
    pytest.importorskip("diffusers")
    from octavo.demo.small_image import WordEncoder
    from octavo.demo.small_image_training import vocabulary

    spec = importlib.util.spec_from_file_location("draw_emoji", SCRIPTS / "draw_emoji.py")
    emoji = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emoji)
    words = WordEncoder(words=vocabulary(list(emoji.parse_names()), list(emoji.SPRITE_SIZES)))
    prompts = read_prompts(None)
    assert len(prompts) == len(set(prompts)) == 16
    assert all(any(words.encode(prompt)) for prompt in prompts)


def test_a_record_names_the_picture_that_was_kept(made):
    kept = []

    def keep(rows):
        kept.append([(name, len(pictures)) for name, pictures in rows])
        return {"picture": "pictures/x.jpg"} if len(rows) > 1 else {}

    plain, fp8 = run(made, on_row=keep)
    assert kept == [[("bf16", 2)], [("bf16", 2), ("fp8", 2)]] and "picture" not in plain.case
    assert fp8.case["picture"] == "pictures/x.jpg"


def test_pictures_are_named_from_the_records_file_on(made, tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    from octavo.measure.evaluate.image_scores import save_row

    monkeypatch.chdir(tmp_path)
    records, folder = Path("a/records.jsonl"), Path("b")
    records.parent.mkdir()
    plain, fp8 = run(made, on_row=lambda rows: save_row(folder, JOB.prompts, rows))
    assert "picture" not in fp8.case and not Path("b/compared_fp8.jpg").exists()
    plain, fp8 = run(made, on_row=lambda rows: save_row(folder, JOB.prompts, rows, records))
    assert "picture" not in plain.case
    assert fp8.case["picture"] == "../b/compared_fp8.jpg" and Path("b/compared_fp8.jpg").is_file()
    assert fp8.case["picture_prompts"] == "dog; cat"


def test_rows_start_with_what_the_others_are_compared_with():
    rows = parse_image_rows(["bf16", "fp8"], "bfloat16")
    assert [row.name for row in rows] == ["bf16", "fp8"] and rows[0].is_plain
    for names, message in (
        ([], "two different rows"),
        (["bf16"], "two different rows"),
        (["bf16", "bf16"], "two different rows"),
        (["fp8", "bf16"], "first row to compare with"),
        (["fp32", "fp8"], "rows in bfloat16, .* got 'fp32'"),
        (["bf16", "fp8+attention=static"], "row fp8.attention=static: .*needs scales, got none"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_image_rows(names, "bfloat16")

"""The small image model that comes with octavo: as good as its record says, and in FP8 as well."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import Recipe, apply_
from octavo.demo.small_image import (
    FOLDER,
    MARK,
    PICTURE_SIZE,
    WEIGHTS,
    load_small_image_model,
)
from octavo.layers.linear import Fp8Linear
from octavo.measure import store
from octavo.measure.evaluate.image_scores import compare_images
from octavo.measure.evaluate.images import ImageJob, draw, read_prompts

pytestmark = pytest.mark.skipif(
    not (FOLDER / MARK).is_file(), reason="the small image model's weights are not in this checkout"
)

MAX_BYTES = 10_000_000
# What the shipped weights must at least have reached when they were trained.
MIN_RECOGNIZED = 0.8
MIN_PSNR_DB = 28.0
# Modulation with FP8 weights alone is next to nothing.
MIN_MODULATION_PSNR_DB = 40.0
RECIPE = Recipe(linear="fp8")
JOB = ImageJob(
    model="small-image", dtype="bfloat16", prompts=read_prompts(None)[:6], num_inference_steps=8
)


def test_the_weights_are_small_and_those_of_a_good_record():
    (record,) = store.read(FOLDER / "record.jsonl")
    size = sum((FOLDER / part / WEIGHTS).stat().st_size for part in ("transformer", "words"))
    assert size == record.values["weights_bytes"] <= MAX_BYTES
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= MAX_BYTES
    assert record.op == "small_image_score" and record.values["recognized"] >= MIN_RECOGNIZED


def test_the_weights_load_and_draw_what_is_asked_for():
    pipe = load_small_image_model()
    weights = [*pipe.transformer.parameters(), *pipe.words.parameters()]
    assert all(weight.isfinite().all() and weight.dtype is torch.bfloat16 for weight in weights)
    # Every prompt of the list is one that it has learned; `encode` raises otherwise.
    assert all(any(pipe.words.encode(prompt)) for prompt in read_prompts(None))
    backgrounds = ("white", "black", "blue")
    pictures = pipe.generate([f"small dog on {name}" for name in backgrounds], 4).float()
    assert pictures.shape == (3, PICTURE_SIZE, PICTURE_SIZE, 3)
    corners = pictures[:, :: PICTURE_SIZE - 1, :: PICTURE_SIZE - 1].mean((1, 2))
    white, black, blue = corners
    assert white.min() > 200 and black.max() < 60
    assert blue.argmax() == 2 and blue[2] > blue[0] + 60


def mean_psnr_db(pictures, break_layer=None, recipe=RECIPE):
    """Of FP8, unless told otherwise with the layers that stay by default, against `pictures`."""
    pipe = load_small_image_model()
    apply_(pipe, recipe)
    if break_layer is not None:
        break_layer(pipe.transformer)
    found = torch.cat(draw(pipe, JOB))
    return compare_images(found, pictures, lpips=False).mean_psnr_db


@pytest.mark.slow
def test_fp8_draws_the_same_pictures_and_a_wrong_layer_does_not():
    plain = torch.cat(draw(load_small_image_model(), JOB))
    assert mean_psnr_db(plain) >= MIN_PSNR_DB

    def break_layer(transformer):
        layer = transformer.single_transformer_blocks[2].proj_mlp
        assert isinstance(layer, Fp8Linear)
        layer.weight_scale.mul_(2)

    assert mean_psnr_db(plain, break_layer) < MIN_PSNR_DB


@pytest.mark.slow
def test_modulation_in_fp8_weights_changes_next_to_nothing():
    plain = torch.cat(draw(load_small_image_model(), JOB))
    others = ["attn", "ff", "ff_context", "proj_mlp", "proj_out"]
    alone = RECIPE.replace(ignored_layers=others, weight_only_layers=["modulation"])
    assert mean_psnr_db(plain, recipe=alone) >= MIN_MODULATION_PSNR_DB

    def break_layer(transformer):
        layer = transformer.single_transformer_blocks[2].norm.linear
        assert isinstance(layer, Fp8Linear) and layer.activation is None
        layer.weight_scale.mul_(1.1)

    assert mean_psnr_db(plain, break_layer, alone) < MIN_MODULATION_PSNR_DB

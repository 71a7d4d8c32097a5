"""The small image model: words, patches, the sampler, files."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers import FluxTransformer2DModel

from octavo.demo.small_image import (
    CONFIG,
    MARK,
    MAX_WORDS,
    PATCH,
    PICTURE_SIZE,
    WEIGHTS,
    WordEncoder,
    cut_patches,
    join_patches,
    load_small_image_model,
    make_small_image_model,
    picture_ids,
    save_small_image_model,
)
from octavo.errors import CheckpointError, ConfigError

TINY = {
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
}
WORDS = ["small", "cat", "dog", "on", "blue"]


@pytest.fixture
def model():
    """A tiny model whose blocks do something, unlike those of a new one."""
    made = make_small_image_model(WORDS, **TINY)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.transformer.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return made


def test_patches_are_squares_of_pixels_and_go_back():
    pictures = torch.randn(2, 3, PICTURE_SIZE, PICTURE_SIZE)
    rows = cut_patches(pictures)
    across = PICTURE_SIZE // PATCH
    assert rows.shape == (2, across**2, 3 * PATCH**2)
    second_row = pictures[1, :, PATCH : 2 * PATCH, 2 * PATCH : 3 * PATCH]
    assert torch.equal(rows[1, across + 2], second_row.flatten())
    assert torch.equal(join_patches(rows), pictures)
    assert picture_ids("cpu")[across + 2].tolist() == [0, 1, 2]


def test_prompts_become_ids_of_words():
    words = WordEncoder(words=WORDS)
    assert words.encode("A small cat, on blue!") == [1, 2, 4, 5, 0, 0, 0, 0]
    assert words.encode("") == [0] * MAX_WORDS
    with pytest.raises(ConfigError, match="got 'cta': did you mean cat"):
        words.encode("small cta")
    with pytest.raises(ConfigError, match="and 80 more: such as small, cat, dog, on, blue"):
        words.encode(" ".join(f"{i}q" for i in range(100)))
    with pytest.raises(ConfigError, match="at most 8 words"):
        words.encode("cat " * 9)
    with pytest.raises(ConfigError, match="different words"):
        WordEncoder(words=["cat", "cat"])
    with pytest.raises(ConfigError, match="different words"):
        WordEncoder(words=[])


def test_the_vector_of_a_prompt_is_that_of_its_words_alone():
    words = WordEncoder(words=WORDS)
    ids = torch.tensor([words.encode(text) for text in ("", "cat", "cat cat", "cat dog")])
    embeds, pooled = words(ids)
    assert embeds.shape == (4, MAX_WORDS, 128) and pooled.shape == (4, 128)
    assert torch.equal(pooled[0], words.pool.bias)  # no word: no division by zero
    torch.testing.assert_close(pooled[1], pooled[2])
    assert not torch.allclose(pooled[1], pooled[3])
    assert not torch.allclose(embeds[2, 0], embeds[2, 1])  # places count


class Oracle(torch.nn.Module):
    """A transformer that knows the picture: the velocity leads straight to it."""

    device = torch.device("cpu")

    def __init__(self, picture):
        super().__init__()
        self.clean, self.batches = cut_patches(picture.unsqueeze(0)), []

    def forward(self, hidden_states, timestep, **kwargs):
        self.batches.append(len(hidden_states))
        return ((hidden_states - self.clean) / timestep[:, None, None],)


@pytest.mark.parametrize("num_steps", [1, 7])
def test_the_sampler_follows_the_velocity_to_the_picture(model, num_steps):
    picture = torch.rand(3, PICTURE_SIZE, PICTURE_SIZE)
    oracle = Oracle(picture * 2 - 1)
    model.register_modules(transformer=oracle)
    drawn = model(["cat"], num_inference_steps=num_steps, output_type="pt").images[0]
    torch.testing.assert_close(drawn, picture, atol=1e-4, rtol=0)
    assert oracle.batches == [2] * num_steps  # with the prompt and without
    oracle.batches.clear()
    model(["cat"], num_inference_steps=num_steps, guidance_scale=1.0, output_type="pt")
    assert oracle.batches == [1] * num_steps


def test_a_picture_depends_on_its_prompt_and_seed_alone(model):
    three = model.generate(["cat", "dog", "dog on blue"], 2, seed=5)
    assert three.shape == (3, PICTURE_SIZE, PICTURE_SIZE, 3) and three.dtype == torch.uint8
    alone = model.generate(["dog"], 2, seed=6)[0]
    assert (alone.int() - three[1].int()).abs().max() <= 1  # sums in another order
    assert (alone != model.generate(["dog"], 2, seed=7)[0]).float().mean() > 0.5
    strong = model.generate(["cat"], 2, guidance=9.0, seed=6)[0]
    assert (strong != alone).any()


def test_it_is_called_as_pipelines_are(model):
    seen = []
    result = model(
        "cat",
        num_inference_steps=2,
        height=PICTURE_SIZE,
        generator=torch.Generator().manual_seed(0),
        callback_on_step_end=lambda pipe, step, timestep, kwargs: seen.append(step),
    )
    assert result.images[0].size == (PICTURE_SIZE, PICTURE_SIZE) and seen == [0, 1]
    assert model("", num_inference_steps=1, output_type="np").images.shape == (1, 48, 48, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "expected a prompt"),
        ({"num_inference_steps": 0}, "0 steps"),
        ({"guidance_scale": float("nan")}, "nan"),
        ({"width": 64}, "width of 48"),
        ({"output_type": "latent"}, "'latent'"),
        ({"generator": [torch.Generator()] * 2}, "generator for each of 1 prompts, got 2"),
    ],
)
def test_calls_that_make_no_sense_are_refused(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        model(**{"prompt": "cat", "num_inference_steps": 1, **changes})


def test_blocks_of_a_new_model_are_the_identity_and_its_output_zero():
    made = make_small_image_model(WORDS, **TINY)
    latents = torch.randn(1, 256, 27)
    ids = torch.zeros(1, MAX_WORDS, dtype=torch.long)
    assert (made.velocity(latents, torch.ones(1), ids) == 0).all()
    block, x = made.transformer.single_transformer_blocks[0], torch.randn(1, 4, 32)
    rotary = made.transformer.pos_embed(torch.zeros(8, 3))
    _, out = block(x, torch.randn(1, 4, 32), torch.randn(1, 32), rotary)
    assert torch.equal(out, x)


def test_the_model_that_ships_fits_in_ten_megabytes_and_fp8():
    made = make_small_image_model([f"word{i}" for i in range(300)])
    parts = (made.transformer, made.words)
    assert 6e6 < sum(2 * p.numel() for part in parts for p in part.parameters()) < 10e6
    blocks = [*made.transformer.transformer_blocks, *made.transformer.single_transformer_blocks]
    linears = [m for b in blocks for m in b.modules() if isinstance(m, torch.nn.Linear)]
    assert linears and all(m.in_features % 16 == m.out_features % 16 == 0 for m in linears)


def test_saved_files_give_the_same_model_here_and_in_diffusers(model, tmp_path):
    size = save_small_image_model(model, tmp_path)
    loaded = load_small_image_model(tmp_path)
    assert loaded.transformer.dtype == loaded.words.dtype == torch.bfloat16
    for part in ("transformer", "words"):
        saved, found = getattr(model, part).state_dict(), getattr(loaded, part).state_dict()
        assert saved.keys() == found.keys()
        assert all(torch.equal(saved[k].bfloat16(), found[k]) for k in saved)
    assert loaded.words.encode("cat on blue") == model.words.encode("cat on blue")
    files = [tmp_path / part / WEIGHTS for part in ("transformer", "words")]
    assert size == sum(file.stat().st_size for file in files)
    theirs = FluxTransformer2DModel.from_pretrained(
        tmp_path, subfolder="transformer", torch_dtype=torch.bfloat16
    )
    before = loaded.generate(["cat"], 2)
    loaded.register_modules(transformer=theirs)
    assert torch.equal(loaded.generate(["cat"], 2), before)


def test_without_weights_the_error_says_how_to_make_them(tmp_path):
    with pytest.raises(CheckpointError, match="got no small_image.json.*train_small_dit.py"):
        load_small_image_model(tmp_path)


def test_damaged_files_are_refused(model, tmp_path):
    save_small_image_model(model, tmp_path)
    (tmp_path / MARK).write_text(json.dumps({"format_version": 9}))
    with pytest.raises(CheckpointError, match="format_version 1, got 9"):
        load_small_image_model(tmp_path)
    (tmp_path / MARK).write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object"):
        load_small_image_model(tmp_path)
    save_small_image_model(model, tmp_path)
    config = tmp_path / "words" / CONFIG
    config.write_text(config.read_text().replace('"size": 128', '"size": 64'))
    with pytest.raises(CheckpointError, match="size mismatch"):
        load_small_image_model(tmp_path)
    weights = tmp_path / "transformer" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="transformer"):
        load_small_image_model(tmp_path)

"""octavo.Omni: words to recipes, seeds, options that a pipeline has not, steps, results."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import ConfigError, ImageSampling, Omni, Recipe, UnsupportedError
from octavo.integrations.diffusers.call import check_options
from octavo.integrations.diffusers.load import load_pipeline
from octavo.layers.linear import Fp8Linear
from octavo.serving.engine.image_request import nth_seed
from octavo_testkit.models.tiny_pipelines import FAMILIES, few, write_pipeline
from octavo_testkit.models.tiny_small_image import write_small_image

TWO_STEPS = ImageSampling(num_inference_steps=2, seed=5)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_small_image(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def find(family):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            write_pipeline(family, folders[family])
        return folders[family]

    return find


@pytest.fixture
def omni(small):
    return Omni(small, dtype="float32", device="cpu")


def pixels(image):
    return np.asarray(image).astype(int)


def num_fp8(omni):
    return sum(isinstance(part, Fp8Linear) for part in omni.pipe.transformer.modules())


def test_results(omni, small):
    steps = []
    sampling = ImageSampling(num_inference_steps=3, seed=5, num_images_per_prompt=2)
    cat, dog = omni.generate(["cat", "dog"], sampling, on_step=lambda *n: steps.append(n))
    assert (cat.prompt, dog.prompt) == ("cat", "dog")
    assert cat.seeds == dog.seeds == (5, 6) and cat.seed == 5
    assert [image.size for image in (*cat.images, *dog.images)] == [(48, 48)] * 4
    assert cat.num_steps == 3 and cat.seconds > 0 and cat.frames == ()
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert not np.array_equal(pixels(cat.images[0]), pixels(dog.images[0]))
    assert omni.model_name == str(small) and not omni.makes_video


def test_a_seed_is_a_picture_whatever_else_is_in_the_batch(omni):
    many = ImageSampling(num_inference_steps=2, seed=5, num_images_per_prompt=3)
    dogs = omni.generate(["cat", "dog"], many)[1].images
    for index, image in enumerate(dogs):
        alone = ImageSampling(num_inference_steps=2, seed=5 + index)
        (found,) = omni.generate("dog", alone)
        assert abs(pixels(found.images[0]) - pixels(image)).max() <= 1
    assert abs(pixels(dogs[0]) - pixels(dogs[1])).max() > 10


def test_the_same_seed_twice_and_none(omni):
    first, second = (omni.generate("cat", TWO_STEPS)[0].images[0] for _ in range(2))
    assert np.array_equal(pixels(first), pixels(second))
    steps = ImageSampling(num_inference_steps=1)
    torch.manual_seed(0)
    drawn = [omni.generate("cat", steps)[0].seed, omni.generate("cat", steps)[0].seed]
    torch.manual_seed(0)
    drawn.append(omni.generate("cat", steps)[0].seed)
    assert len(set(drawn)) == 3


def test_batches_of_a_size(small, omni):
    steps = []
    few_at_once = Omni(small, dtype="float32", max_batch_size=2)
    sampling = ImageSampling(num_inference_steps=2, seed=5, num_images_per_prompt=3)
    results = few_at_once.generate(["cat"], sampling, on_step=lambda *n: steps.append(n))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert results[0].num_steps == 2 and len(results[0].images) == 3
    whole = omni.generate(["cat"], sampling)[0]
    for ours, theirs in zip(results[0].images, whole.images, strict=True):
        assert abs(pixels(ours) - pixels(theirs)).max() <= 1
    with pytest.raises(ConfigError, match="max_batch_size of 1 or more, got 0"):
        Omni(small, max_batch_size=0)


def test_fp8_changes_layers_and_pictures_a_little(small, omni):
    fp8 = Omni(small, quantization="fp8", attention="fp8", dtype="float32")
    assert fp8.recipe == Recipe(linear="fp8", attention="fp8")
    assert num_fp8(fp8) == len(fp8.changes.layers["transformer.linear"]) > 0
    assert fp8.changes.layers["transformer.attention"]
    assert omni.changes is None and omni.recipe.is_empty and num_fp8(omni) == 0
    plain, quantized = (o.generate("cat", TWO_STEPS)[0].images[0] for o in (omni, fp8))
    difference = abs(pixels(plain) - pixels(quantized))
    assert 0 < difference.mean() < 12


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({"quantization_config": "fp8"}, Recipe(linear="fp8")),
        (
            {"quantization_config": {"method": "fp8", "ignored_layers": ["to_q"]}},
            Recipe(linear="fp8", ignored_layers=["to_q"]),
        ),
        (
            {"quantization_config": {"method": "fp8", "weight_block_size": [128, 128]}},
            Recipe(linear={"weight": "block 128x128"}),
        ),
        (
            {"quantization_config": {"transformer": {"method": "fp8"}, "words": None}},
            Recipe(components={"transformer": {"linear": "fp8"}, "words": None}),
        ),
        (
            {"quantization_config": {"trans": "fp8"}, "attention": "fp8"},
            Recipe(components={"transformer": {"linear": "fp8", "attention": "fp8"}}),
        ),
        (
            {"quantization_config": {"default": {"method": "fp8"}, "words": None}},
            Recipe(components={"transformer": {"linear": "fp8"}, "words": None}),
        ),
        (
            {"quantization_config": {"words": None}, "attention": {"granularity": "head"}},
            Recipe(components={"words": None}, attention={"granularity": "head"}),
        ),
        ({"recipe": Recipe(linear="fp8")}, Recipe(linear="fp8")),
    ],
)
def test_words_become_one_recipe(small, options, recipe):
    made = Omni(small, **options)
    assert made.recipe == recipe
    num_ignored = 1 + 1 if recipe.ignored_layers else 0
    has_linear = "linear" in str(recipe)
    assert num_fp8(made) == (17 - num_ignored if has_linear else 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "expected 'fp8' or None, got 'int8'"),
        ({"quantization_config": {"method": "int8"}}, "method: expected 'fp8'"),
        ({"quantization_config": {"method": "fp8", "ignored": []}}, "unknown key"),
        ({"quantization_config": {"vae": None}}, "components such as 'transformer', 'words'"),
        ({"quantization_config": {}}, "got an empty mapping"),
        ({"quantization_config": {"method": "fp8", "ignored_layers": ["img_mlp"]}}, "img_mlp"),
        ({"quantization_config": {"method": "fp8", "activation_scheme": "static"}}, "needs scales"),
        ({"quantization": "fp8", "quantization_config": "fp8"}, "got both"),
        ({"quantization": "fp8", "recipe": Recipe(linear="fp8")}, "got both"),
        ({"cache_config": {}}, "expected a cache_backend with it"),
        ({"dtype": "int8"}, "expected a dtype, one of bfloat16"),
    ],
)
def test_what_cannot_be_meant_raises(small, options, message):
    with pytest.raises(ConfigError, match=message):
        Omni(small, **options)


def test_a_loaded_pipeline(small):
    pipe = load_pipeline(small, torch.float32)
    plain = Omni(pipe).generate("cat", TWO_STEPS)[0]
    fp8 = Omni(pipe, quantization="fp8")
    assert fp8.pipe is pipe and num_fp8(fp8)
    assert plain.images[0].tobytes() != fp8.generate("cat", TWO_STEPS)[0].images[0].tobytes()
    with pytest.raises(ConfigError, match="a pipeline that is loaded already"):
        Omni(pipe, dtype="float32")
    with pytest.raises(ConfigError, match="expected a model's name"):
        Omni(3)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (ImageSampling(negative_prompt="x"), "negative_prompt: expected an option of SmallImage"),
        (ImageSampling(num_frames=9), "num_frames"),
        (ImageSampling(extra_args={"sigma": 1}), "sigma: expected an option"),
    ],
)
def test_an_option_that_the_pipeline_has_not_raises(omni, sampling, message):
    with pytest.raises(UnsupportedError, match=message):
        omni.generate("cat", sampling)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_inference_steps": 0},
            "num_inference_steps: expected a number greater than or equal to 1",
        ),
        ({"num_inference_steps": True}, "got True"),
        ({"height": 48.0}, "height"),
        ({"seed": 2**63}, "seed"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": "2"}, "guidance_scale"),
        ({"num_images_per_prompt": None}, "num_images_per_prompt"),
        ({"negative_prompt": ["a"]}, "negative_prompt: expected a valid string"),
        ({"extra_args": {"height": 3}}, "extra_args: expected names of no other field"),
        ({"extra_args": {"generator": 3}}, "extra_args"),
    ],
)
def test_samplings_that_nothing_can_do(fields, message):
    with pytest.raises(ConfigError, match=message):
        ImageSampling(**fields)


def test_seeds_go_round():
    assert nth_seed(2**63 - 1, 1) == -(2**63)
    assert [nth_seed(-1, index) for index in range(3)] == [-1, 0, 1]


def test_what_the_pipeline_refuses_is_an_error_of_ours(omni):
    with pytest.raises(ConfigError, match="the only size that the small image"):
        omni.generate("cat", ImageSampling(height=64, num_inference_steps=1))
    with pytest.raises(ConfigError, match="words that the model has learned"):
        omni.generate("horse", TWO_STEPS)
    for prompts in ([], [3], b"cat"):
        with pytest.raises(ConfigError, match="expected one prompt or more"):
            omni.generate(prompts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as it is for a user
def test_pixels_that_are_not_numbers_raise(omni):
    """Pillow images of them would be black, or worse."""
    omni.pipe.transformer.proj_out.bias.data.fill_(float("nan"))
    with pytest.raises(UnsupportedError, match="expected finite pixels, got NaN from SmallImage"):
        omni.generate("cat", TWO_STEPS)


def test_what_on_step_raises_ends_the_call(omni):
    class Enough(Exception):
        pass

    def stop(num_done, total):
        seen.append(num_done)
        raise Enough

    seen, freed = [], []
    omni.pipe.maybe_free_model_hooks = lambda: freed.append(True)
    with pytest.raises(Enough):
        omni.generate("cat", TWO_STEPS, on_step=stop)
    assert seen == [1] and freed == [True]
    assert "progress_bar" not in vars(omni.pipe)
    assert omni.generate("cat", TWO_STEPS)[0].num_steps == 2


def test_the_cache_is_asked_for_after_quantization(small, monkeypatch):
    found = []

    def use(pipe, *words):
        num_layers = sum(isinstance(part, Fp8Linear) for part in pipe.transformer.modules())
        found.append((num_layers, words))

    monkeypatch.setattr("octavo.serving.engine.omni.use_step_cache_", use)
    config = {"rel_l1_thresh": 0.2, "coefficients": [1.0, 0.0]}
    Omni(small, quantization="fp8", cache_backend="tea_cache", cache_config=config)
    Omni(small, cache_backend="first_block_cache")
    assert found == [(17, ("tea_cache", config)), (0, ("first_block_cache", None))]


def test_a_cache_that_cannot_be_leaves_a_pipeline_as_it_was(small):
    pipe = load_pipeline(small, torch.float32)
    with pytest.raises(ConfigError, match="expected coefficients|FLUX.1-dev"):
        Omni(pipe, quantization="fp8", cache_backend="tea_cache")
    assert not any(isinstance(part, Fp8Linear) for part in pipe.transformer.modules())


def test_the_model_that_comes_with_octavo():
    omni = Omni(quantization="fp8", device="cpu")
    assert omni.model_name == "small-image"
    prompt = omni.pipe.words.config.words[-1]
    (result,) = omni.generate(prompt, TWO_STEPS)
    assert result.images[0].size == (48, 48)


def test_the_real_cache(small):
    cached = Omni(small, cache_backend="first_block_cache", cache_config={"threshold": 0.5})
    sampling = ImageSampling(num_inference_steps=4, seed=5)
    first, second = (cached.generate("cat", sampling)[0].images[0] for _ in range(2))
    assert first.tobytes() == second.tobytes()


def asked_of(family, **fields):
    """A sampling of what a family's tiny pipeline needs."""
    call = dict(FAMILIES[family].call)
    known = {n: call.pop(n) for n in list(call) if n in ImageSampling.__dataclass_fields__}
    base = {"num_inference_steps": 2, "seed": 3, "extra_args": call, **known}
    return ImageSampling(**{**base, **fields})


@pytest.mark.parametrize("family", few("flux"))
def test_every_family(folder_of, family):
    omni = Omni(folder_of(family), quantization="fp8")
    sampling = asked_of(family, num_images_per_prompt=2)
    results = omni.generate(["a cat", "a small dog on a mat"], sampling)
    assert [result.seeds for result in results] == [(3, 4), (3, 4)]
    for result in results:
        assert result.num_steps == 2
        if family in ("wan", "hunyuan_video"):
            assert omni.makes_video and [len(frames) for frames in result.frames] == [9, 9]
        else:
            assert [image.width for image in result.images] == [sampling.width] * 2
    again = omni.generate(["a cat", "a small dog on a mat"], sampling)
    for one, other in zip(results, again, strict=True):
        for mine, its in zip(one.images, other.images, strict=True):
            assert mine.tobytes() == its.tobytes()


def test_options_that_flux_would_drop_raise(folder_of):
    pipe = load_pipeline(folder_of("flux"))
    with pytest.raises(ConfigError, match="negative_prompt: expected true_cfg_scale above 1"):
        check_options(pipe, {"negative_prompt": "x"})
    with pytest.raises(ConfigError, match="true_cfg_scale: expected a negative_prompt"):
        check_options(pipe, {"true_cfg_scale": 4.0})
    check_options(pipe, {"negative_prompt": "x", "true_cfg_scale": 4.0, "guidance_scale": 2.0})
    with pytest.raises(ConfigError, match="height: expected a multiple of 2, got 33"):
        check_options(pipe, {"height": 33})
    pipe.transformer.register_to_config(guidance_embeds=False)
    with pytest.raises(ConfigError, match="has learned guidance"):
        check_options(pipe, {"guidance_scale": 2.0})


def test_a_size_that_the_pipeline_rounds_raises(omni, monkeypatch):
    small_call = type(omni.pipe).__call__

    def rounding(self, prompt, *, height=None, **options):
        del height
        return small_call(self, prompt, **options)

    def signed(self, prompt: list[str], *, height=None, generator: list[int] = (), **options):
        return rounding(self, prompt, height=height, generator=generator, **options)

    monkeypatch.setattr(type(omni.pipe), "__call__", signed)
    with pytest.raises(UnsupportedError, match="height: expected 50 pixels, got 48"):
        omni.generate("cat", ImageSampling(height=50))


def test_it_says_what_is_in_fp8(small):
    plain = Omni(small, dtype="bfloat16", device="cpu")
    assert plain.precision.words() == {"attention": "BF16", "linear layers": "BF16"}
    omni = Omni(small, quantization="fp8", attention="fp8", dtype="bfloat16", device="cpu")
    attention, linear = omni.precision.layers
    assert (attention.kind, linear.kind) == ("attention", "linear")
    assert attention.num_fp8 == len(omni.changes.layers["transformer.attention"]) > 0
    assert linear.num_fp8 == num_fp8(omni) > 0
    assert linear.num_layers == sum(
        isinstance(part, torch.nn.Linear)
        for model in omni.pipe.components.values()
        if isinstance(model, torch.nn.Module)
        for part in model.modules()
    )
    assert str(omni.precision).startswith(f"attention: FP8 in all {attention.num_fp8} layers; ")

"""Images as the engine takes them: tokens, positions, hashes; and FP8 vision attention there."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from PIL import Image

import octavo
from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.transformers import vision
from octavo.integrations.transformers.engine_images import EngineImages
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.layers.encoder_attention import EncoderAttention
from octavo_testkit.models import vision_families, vlm_folders
from octavo_testkit.models.text_models import make_decoder
from octavo_testkit.models.vision_families import (
    IMAGE,
    MERGE,
    START,
    STOP,
    make_image,
    make_processor,
)

SETTINGS = octavo.EngineSettings(page_size=16, num_pages=16, max_num_seqs=2)
GREEDY = octavo.Sampling(temperature=0, max_tokens=12)
PROMPT = {"prompt": [10, 11, START, IMAGE, STOP, 12], "images": [make_image(1)]}


@pytest.fixture(scope="module")
def images():
    return EngineImages(vision_families.make_model("qwen3_vl"), make_processor())


def test_places_become_tokens_and_positions(images):
    # 24 × 40 pixels: 3 × 5 tokens.
    found = images.prepare((10, START, IMAGE, STOP, 11), [make_image(1)])
    assert found.tokens == (10, START, *[IMAGE] * 15, STOP, 11)
    (span,) = found.spans
    assert (span.start, span.stop) == (2, 17)
    frame, row, column = found.positions.tolist()
    assert frame == [0, 1, *[2] * 15, 7, 8]
    assert row[2:17] == [2 + y for y in range(3) for _ in range(5)]
    assert column[2:17] == [2 + x for _ in range(3) for x in range(5)]
    assert found.offset == 9 - 19
    # Generated tokens go on where the prompt ended, in all three parts.
    assert found.positions_of(17, 21).tolist() == [[7, 8, 9, 10]] * 3
    assert found.positions_of(19, 20).tolist() == [[9]] * 3
    assert found.positions_of(2, 4).tolist() == [[2, 2], [2, 2], [2, 3]]


def test_a_prompt_may_have_all_tokens_already(images):
    short = images.prepare((10, START, IMAGE, STOP, 11), [make_image(1)])
    long = images.prepare(short.tokens, [make_image(1)])
    assert (long.tokens, long.spans) == (short.tokens, short.spans)
    smallest = images.prepare((START, IMAGE, STOP), [make_image(0)])  # one token
    assert smallest.tokens == (START, IMAGE, STOP)


def test_hashes_are_of_content_and_grid(images):
    def digest(pixels):
        return images.prepare((IMAGE, STOP), [Image.fromarray(pixels)]).spans[0].digest

    noise = np.array(make_image(1))
    other = noise.copy()
    other[7, 9, 1] ^= 128
    assert digest(noise) == digest(noise.copy()) != digest(other)
    flat = np.zeros((8, 32, 3), np.uint8)
    assert digest(flat) != digest(flat.reshape(32, 8, 3)) != digest(flat.reshape(16, 16, 3))


def test_images_are_asked_for_one_after_another(images):
    seen = []

    def made():
        for number in (1, 2, 6):
            seen.append(number)
            yield make_image(number)
            gone.append(len(seen))

    gone = []
    prompt = (IMAGE, STOP, IMAGE, STOP, IMAGE)
    lazily = images.prepare(prompt, made())
    assert (seen, gone) == ([1, 2, 6], [1, 2, 3])
    whole = images.prepare(prompt, [make_image(n) for n in (1, 2, 6)])
    assert (lazily.tokens, lazily.spans) == (whole.tokens, whole.spans)
    # As the processor makes them all at once.
    found = make_processor()(images=[make_image(n) for n in (1, 2, 6)], return_tensors="pt")
    assert torch.equal(torch.cat(lazily.pixels), torch.as_tensor(found["pixel_values"]))
    assert lazily.grids.tolist() == torch.as_tensor(found["image_grid_thw"]).tolist()
    assert lazily.num_pixels == (15 + 6 + 15) * 8**2


def odd_sizes():
    """Sizes around the model's own and far beyond it, among them narrow ones."""
    random = np.random.default_rng(0)
    for _ in range(150):
        width, height = (int(side) for side in random.integers(1, 700, 2))
        yield width, height
        yield 10 * width, max(1, height // 20, width // 15)
    yield from [(64, 64), (255, 256), (256, 256), (4000, 24), (24, 4000), (1600, 8), (8, 1600)]


def is_taken(images, size):
    try:
        return images.count_tokens(*size) is not None
    except ConfigError:
        return False


def test_tokens_are_counted_from_sizes_alone(images):
    for size in list(odd_sizes())[:80]:
        if is_taken(images, size):
            (span,) = images.prepare((IMAGE,), [Image.new("RGB", size)]).spans
            assert images.count_tokens(*size) == span.stop, size
    with pytest.raises(ConfigError, match=r"processor takes, got ValueError: .*aspect ratio"):
        images.count_tokens(1, 300)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_what_the_model_sees_of_a_reduced_image_is_nearly_the_same(images, factor):
    random = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    whole = Image.fromarray(random).resize((1200, 800), Image.Resampling.BICUBIC)
    assert images.choose_reduction(*whole.size, [factor]) == factor
    seen, reduced = (
        images.prepare((IMAGE,), [image]).pixels[0] for image in (whole, whole.reduce(factor))
    )
    difference = (seen - reduced).abs().mean() / seen.std()
    assert float(difference) < 0.05


def test_a_processor_that_does_not_count_reduces_nothing(images, monkeypatch):
    monkeypatch.setattr(images, "_processor", lambda **_: None)
    assert images.count_tokens(900, 900) is None
    assert images.choose_reduction(900, 900, range(2, 65)) == 1


@pytest.mark.parametrize("factors", [(8, 4, 2), range(2, 65)], ids=["jpeg", "others"])
def test_a_reduction_leaves_the_grid_as_it_is_and_more_than_the_model_sees(images, factors):
    chosen = []
    for width, height in filter(lambda size: is_taken(images, size), odd_sizes()):
        factor = images.choose_reduction(width, height, factors)
        chosen.append(factor)
        if factor == 1:
            continue
        whole, reduced = (
            images.prepare((IMAGE,), [Image.new("RGB", (-(-width // by), -(-height // by)))])
            for by in (1, factor)
        )
        assert reduced.grids.tolist() == whole.grids.tolist(), (width, height, factor)
        _, rows, columns = (side * vision_families.PATCH for side in whole.grids[0].tolist())
        assert width / factor >= 1.4 * columns, (width, height, factor)
        assert height / factor >= 1.4 * rows, (width, height, factor)
        assert (width / factor) * (height / factor) >= 4 * whole.num_pixels
    assert len(set(chosen)) > 2
    # Within four times the side that the model sees, nothing is touched.
    assert {images.choose_reduction(side, side, factors) for side in range(1, 256)} == {1}
    assert images.choose_reduction(256, 256, factors) == 2


def test_the_tower_gives_the_same_alone_and_together():
    # float64: products of another size round otherwise, and these weights make much of it.
    model = vision_families.make_model("qwen3_vl").double()
    images = EngineImages(model, make_processor())
    prompt = (IMAGE, STOP, IMAGE, STOP, IMAGE)
    found = images.prepare(prompt, [make_image(n) for n in (1, 2, 0)])
    together = images.encode(found, [0, 1, 2])
    assert [len(one.embeddings) for one in together] == [15, 6, 1]
    for index in range(3):
        (alone,) = images.encode(found, [index])
        torch.testing.assert_close(alone.embeddings, together[index].embeddings)
        assert len(alone.deepstack) == 2
        for mine, theirs in zip(alone.deepstack, together[index].deepstack, strict=True):
            torch.testing.assert_close(mine, theirs)
    cut = together[0].rows(3, 5)
    assert [len(x) for x in (cut.embeddings, *cut.deepstack)] == [2, 2, 2]


def test_the_largest_image_is_tried(images, monkeypatch):
    seen = []
    features = images._model.get_image_features
    monkeypatch.setattr(
        images._model,
        "get_image_features",
        lambda pixels, **other: seen.append(other) or features(pixels, **other),
    )
    images.try_largest(10)
    assert seen[0]["image_grid_thw"].tolist() == [[1, 3 * MERGE, 3 * MERGE]]


def test_the_trial_leaves_dynamic_scales_as_they_were():
    model = vision_families.make_model("qwen3_vl")
    octavo.apply_(model, octavo.Recipe(vision_attention="fp8"))
    EngineImages(model, make_processor()).try_largest(4)
    layers = [m for m in model.modules() if isinstance(m, EncoderAttention)]
    assert [int(layer.scaling.num_passes) for layer in layers] == [0, 0, 0]


def test_pixels_are_kept_in_the_dtype_of_the_tower():
    model = vision_families.make_model("qwen3_vl").bfloat16()
    found = EngineImages(model, make_processor()).prepare((IMAGE,), [make_image(0)])
    assert found.pixels[0].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="one image or more"):
        EngineImages(model, make_processor()).prepare((1,), [])


def test_odd_sizes(images):
    smallest = images.prepare((IMAGE,), [Image.new("RGB", (1, 1))])
    assert smallest.tokens == (IMAGE,)
    with pytest.raises(ConfigError, match=r"processor takes, got ValueError: .*aspect ratio"):
        images.prepare((IMAGE,), [Image.new("RGB", (1, 300))])


def test_threads_may_prepare_at_once(images):
    def prepare(number):
        found = images.prepare((9, IMAGE, STOP), [make_image(number % 10)])
        return (found.tokens, found.spans)

    alone = [prepare(number) for number in range(10)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(prepare, range(80)))
    assert together == alone * 8


def test_a_processor_with_other_patches_is_refused(images, monkeypatch):
    def halved(**inputs):
        found = make_processor()(**inputs)
        return {**found, "pixel_values": found["pixel_values"][:-1]}

    monkeypatch.setattr(images, "_processor", halved)
    with pytest.raises(ConfigError, match="expected the patches of one image, got 59"):
        images.prepare((IMAGE,), [make_image(1)])


@pytest.mark.parametrize("kind", ["llama", "llava"])
def test_other_families_are_refused_by_name(kind, tmp_path):
    if kind == "llama":
        model = make_decoder("llama")
    else:
        from transformers import LlavaForConditionalGeneration

        folder = vlm_folders.write_llava(tmp_path)
        model = LlavaForConditionalGeneration.from_pretrained(folder)
    families = "qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe"
    with pytest.raises(UnsupportedError, match=families):
        octavo.LLM(model, image_processor=make_processor(), settings=SETTINGS)
    octavo.LLM(model, settings=SETTINGS).close()  # and the engine has left nothing behind
    with pytest.raises(UnsupportedError, match="got vision_attention"):
        EngineModel(model, octavo.Recipe(vision_attention="fp8"))


def test_linear_attention_is_still_refused():
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    _, tower, text = vision_families.FAMILIES["qwen3_5"]
    text = {**text, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(vision_config=dict(tower), text_config=text)
    )
    with pytest.raises(UnsupportedError, match="whose state no page holds"):
        EngineModel(model.eval())


def recipe(kind, model):
    match kind:
        case "dynamic":
            return octavo.Recipe(vision_attention="fp8")
        case "both":
            return octavo.Recipe(
                vision_attention="fp8",
                kv_cache={"granularity": "token"},
                skip_layers=["re:.*s.1.*"],
            )
    layers = [vision.scale_name(name) for name in vision.find_layers(model)]
    scales = ScaleSet(
        dict.fromkeys(layers, LayerScales(0.02, 0.02, 0.02)), ScaleHeader(kind="vision_attention")
    )
    return octavo.Recipe(vision_attention={"scaling": "static"}, scales=scales.to_dict())


@pytest.mark.parametrize("kind", ["dynamic", "static", "both"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_vision_attention_is_that_of_apply(family, kind):
    model = vision_families.make_model(family)
    before = vision_families.generate(model, PROMPT["prompt"], PROMPT["images"], 12)
    own = recipe(kind, model)
    octavo.apply_(model, own)
    truth = vision_families.generate(model, PROMPT["prompt"], PROMPT["images"], 12)
    octavo.restore_(model)
    llm = octavo.LLM(model, recipe=own, settings=SETTINGS, image_processor=make_processor())
    with llm:
        (done,) = llm.generate([PROMPT], GREEDY)
        fp8 = [m for m in model.modules() if isinstance(m, EncoderAttention)]
        assert len(fp8) == 3 and sum(m.scaling is None for m in fp8) == (kind == "both")
    assert done.tokens == truth
    # Given back as it was.
    assert not any(isinstance(m, EncoderAttention) for m in model.modules())
    assert vision_families.generate(model, PROMPT["prompt"], PROMPT["images"], 12) == before


def test_static_scales_change_what_the_tower_sees():
    """A wrong scale file would be noticed: scales reach the tower."""
    model = vision_families.make_model("qwen3_vl")
    layers = [vision.scale_name(name) for name in vision.find_layers(model)]
    scales = ScaleSet(
        dict.fromkeys(layers, LayerScales(1e-6, 1e-6, 1e-6)), ScaleHeader(kind="vision_attention")
    )
    wrong = octavo.Recipe(vision_attention={"scaling": "static"}, scales=scales.to_dict())
    right = recipe("static", model)
    answers = []
    for own in (right, wrong):
        with octavo.LLM(
            model, recipe=own, settings=SETTINGS, image_processor=make_processor()
        ) as llm:
            answers.append(llm.generate([PROMPT], GREEDY)[0].tokens)
    assert answers[0] != answers[1]


def test_what_vision_attention_cannot_do_leaves_the_model_as_it_was():
    model = vision_families.make_model("qwen3_vl")
    fp8 = octavo.Recipe(vision_attention="fp8")
    with pytest.raises(ConfigError, match="one of .*got 'fastest'"):
        EngineModel(model, fp8, vision_impl="fastest")
    with pytest.raises(ConfigError, match="a recipe without"):
        EngineModel(model, octavo.Recipe(), vision_impl="reference")
    with pytest.raises(UnsupportedError, match="gluon"):
        EngineModel(model, fp8, vision_impl="gluon")  # not on a CPU
    kv = ScaleSet({"x": LayerScales(1.0, 1.0, 1.0)}, ScaleHeader(kind="kv_cache"))
    static = octavo.Recipe(vision_attention={"scaling": "static"}, scales=kv.to_dict())
    with pytest.raises(CheckpointError, match="expected scales for vision_attention"):
        EngineModel(model, static)
    EngineModel(model, fp8, vision_impl="reference").close()
    with pytest.raises(ConfigError, match="as it was made"):
        octavo.restore_(model)

"""Images in prompts, whatever is scheduled with whom: the tokens are those of model.generate()."""

import functools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers import engine_images
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.request import Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.models import vision_families
from octavo_testkit.models.vision_families import (
    FAMILIES,
    FIRST_WORD,
    IMAGE,
    STOP,
    VOCABULARY,
    place_images,
)

PAGE_SIZE = 16
SETTINGS = {"page_size": PAGE_SIZE, "num_pages": 16, "max_num_seqs": 4}


@functools.cache
def make_model(family, role):
    """The engine's is like that of `expected`."""
    return vision_families.make_model(family)


@functools.cache
def words(number, length):
    chance = random.Random(number)
    return tuple(chance.randrange(FIRST_WORD, VOCABULARY) for _ in range(length))


@functools.cache
def expected(family, parts, num_tokens):
    tokens, images = place(parts)
    return vision_families.generate(make_model(family, "truth"), tokens, images, num_tokens)


def place(parts):
    """Parts as they can be kept in a cache: tokens, or the number of an image."""
    return place_images([[part] if isinstance(part, int) else part for part in parts])


def make_engine(family, **options):
    return load_engine(
        make_model(family, "engine"),
        None,
        EngineSettings(**{**SETTINGS, **options}),
        image_processor=vision_families.make_processor(),
    )


def make_request(name, parts, num_tokens=8):
    tokens, images = place(parts)
    sampling = Sampling(max_tokens=num_tokens, temperature=0)
    return Request(request_id=name, prompt=tokens, images=images, sampling=sampling)


def run(engine, *requests):
    deltas = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        engine._scheduler.check_invariants()
    return [gather(found) for found in deltas.values()]


def draw_parts(chance):
    """Prompts that begin alike, with images that differ in content, in size or in place."""
    parts = [words(0, chance.choice([1, 6, 17]))]
    for number in range(chance.choice([0, 1, 1, 1, 2])):
        parts += [chance.choice([1, 6, 0, 3]), words(number + 1, chance.choice([1, 3]))]
    return tuple(parts)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4)
@given(data=st.data())
def test_random_schedules(family, data):
    max_num_seqs = data.draw(st.integers(1, 5), "max_num_seqs")
    engine = make_engine(
        family,
        num_pages=data.draw(st.integers(6, 12), "num_pages"),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=data.draw(st.sampled_from([max_num_seqs, 7, 40, 200]), "budget"),
        enable_prefix_caching=data.draw(st.booleans(), "caching"),
    )
    chance = random.Random(data.draw(st.integers(0, 2**16), "seed"))
    asked, deltas = {}, {}
    try:
        while len(asked) < 6 or engine.has_work:
            if len(asked) < 6 and chance.random() < 0.8:
                name, parts = str(len(asked)), draw_parts(chance)
                asked[name] = (parts, chance.choice([1, 8, 24]))
                engine.add(make_request(name, *asked[name]))
                deltas[name] = []
            if asked and chance.random() < 0.03:
                engine.abort(chance.choice(list(asked)))
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
            engine._scheduler.check_invariants()
        for name, (parts, num_tokens) in asked.items():
            done, truth = gather(deltas[name]), expected(family, parts, num_tokens)
            is_aborted = done.finish_reason == "abort"
            assert done.tokens == (truth[: len(done.tokens)] if is_aborted else truth)
        assert engine.stats().num_pages_in_use == 0 and len(engine._runner.images._kept) == 0
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_and_prefix_hits_happen_and_change_nothing(family):
    engine = make_engine(family, num_pages=8, max_num_batched_tokens=12)
    asked = [(words(0, 17), 1, words(1, 3), 3, words(2, n + 1)) for n in range(4)]
    try:
        requests = [make_request(str(n), parts, 24) for n, parts in enumerate(asked)]
        completions = run(engine, *requests)
        again = run(engine, replace(requests[0], request_id="again"))
        assert [done.tokens for done in [*completions, *again]] == [
            expected(family, parts, 24) for parts in [*asked, asked[0]]
        ]
        stats = engine.stats()
        assert stats.num_preemptions > 0 and again[0].usage.cached_tokens >= 32
        assert stats.num_pages_in_use == 0 and len(engine._runner.images._kept) == 0
    finally:
        engine.close()


def _without_places(images):
    flat = torch.arange(images.positions.shape[1]).expand(3, -1)
    return replace(images, positions=flat)


def _without_deepstack(images):
    features = images.features
    return replace(images, features=features and replace(features, deepstack=()))


def _of_another_token(images):
    return replace(images, places=images.places - 1)


@pytest.mark.parametrize(
    ("family", "damage"),
    [
        *((family, _without_places) for family in FAMILIES),
        *((family, _of_another_token) for family in FAMILIES),
        ("qwen3_vl", _without_deepstack),
        ("qwen3_vl_moe", _without_deepstack),
    ],
)
def test_wrong_positions_and_embeddings_would_be_noticed(family, damage, monkeypatch):
    right = engine_images.forward

    def wrong(model, decoder, ids, rows, images, **others):
        return right(model, decoder, ids, rows, damage(images), **others)

    monkeypatch.setattr(engine_images, "forward", wrong)
    engine = make_engine(family)
    parts = (words(0, 3), 1, words(1, 2), 2, words(2, 3))
    try:
        assert run(engine, make_request("a", parts, 16))[0].tokens != expected(family, parts, 16)
    finally:
        engine.close()


@pytest.fixture
def engine():
    made = make_engine("qwen3_vl")
    yield made
    made.close()


@pytest.fixture
def calls(engine, monkeypatch):
    """The images of each call of the vision tower."""
    found, encode = [], engine._images.encode

    def counted(images, which):
        found.append(list(which))
        return encode(images, which)

    monkeypatch.setattr(engine._images, "encode", counted)
    return found


def test_images_of_other_content_share_no_page(engine, calls):
    # Three pages, the image in the second; 1 and 6 have one size.
    parts = [(words(0, 17), number, words(1, 20)) for number in (1, 6)]
    first, other, same = run_one_by_one(engine, [*parts, parts[0]])
    assert (first.usage.cached_tokens, other.usage.cached_tokens) == (0, 16)
    assert same.usage.cached_tokens == 48 and len(calls) == 2  # the third needed no tower
    assert [done.tokens for done in (first, other, same)] == [
        expected("qwen3_vl", one, 8) for one in (*parts, parts[0])
    ]
    assert first.tokens != other.tokens


def run_one_by_one(engine, all_parts):
    return [run(engine, make_request(str(n), parts))[0] for n, parts in enumerate(all_parts)]


def test_the_tower_runs_once_for_a_request_and_its_work_is_dropped_in_time():
    engine = make_engine("qwen3_vl", max_num_batched_tokens=4, max_num_seqs=4)
    encode, found = engine._images.encode, []
    engine._images.encode = lambda images, which: found.append(which) or encode(images, which)
    store = engine._runner.images
    try:
        engine.add(make_request("a", (words(0, 6), 1, words(1, 3), 2, words(2, 9))))
        kept = []
        while engine.has_work:
            engine.step()
            kept.append(len(store._kept))
        assert found == [[0, 1]]
        # 6 + 17 + 3 + 8 + 9 tokens, four a step: the first image begins in the second step, and
        # the last one ends at the 33rd token, in the ninth.
        assert kept[:10] == [0, *[1] * 7, 0, 0] and not any(kept[10:])
    finally:
        engine.close()


def test_an_image_that_is_known_is_not_computed_with_a_new_one(engine, calls):
    known = (words(0, 2), 1, words(1, 14))  # 2 + 17 + 14 tokens: two full pages
    run_one_by_one(engine, [known])
    (done,) = run(engine, make_request("b", (*known, 3, words(2, 2))))
    assert calls == [[0], [1]]
    assert done.tokens == expected("qwen3_vl", (*known, 3, words(2, 2)), 8)


def test_an_abort_drops_embeddings(engine):
    engine.add(make_request("a", (words(0, 1), 1, words(1, 100), 1, words(2, 1))))
    engine._scheduler.settings = replace(engine._scheduler.settings, max_num_batched_tokens=8)
    engine.step()
    assert len(engine._runner.images._kept) == 1
    engine.abort("a")
    assert len(engine._runner.images._kept) == 0


def test_a_tower_that_fails_ends_its_own_request_alone(engine, monkeypatch, caplog):
    encode = engine._images.encode

    def fails_for_one(images, which):
        if images.spans[0].start == 5:
            raise torch.OutOfMemoryError("too large")
        return encode(images, which)

    monkeypatch.setattr(engine._images, "encode", fails_for_one)
    asked = [(words(0, 4), 1, words(1, 3)), (words(0, 6), 1, words(1, 3)), (words(0, 9),)]
    failed, *others = run(engine, *(make_request(str(n), p) for n, p in enumerate(asked)))
    assert failed.finish_reason == "error" and "OutOfMemoryError: too large" in failed.error
    assert [done.tokens for done in others] == [expected("qwen3_vl", p, 8) for p in asked[1:]]
    assert engine.stats().num_pages_in_use == 0 and len(engine._runner.images._kept) == 0
    assert "its images failed" in caplog.text


def test_passes_without_images_have_no_image_pass(engine, monkeypatch):
    seen, forward = [], engine._model.forward

    def watched(ids, positions, rows, step, images=None):
        seen.append((positions.dim(), images is not None))
        return forward(ids, positions, rows, step, images)

    monkeypatch.setattr(engine._model, "forward", watched)
    run(engine, make_request("a", (words(0, 3), 1, words(1, 3)), 4))
    assert seen == [(1, True), (1, False), (1, False), (1, False)]


def test_a_generated_image_token_is_text():
    # After a preemption it is computed with the prompt, and has no image then either.
    engine = make_engine("qwen3_vl")
    try:
        request = make_request("a", (words(0, 3), 1, words(1, 3)), 6)
        engine.add(request)
        deltas = engine.step()
        sequence = engine._scheduler.running[0]
        sequence.tokens[-1] = sequence.output[-1] = IMAGE
        engine._scheduler._preempt(sequence)
        while engine.has_work:
            deltas += engine.step()
        images = engine.prepare_images(request.prompt, request.images)
        with torch.inference_mode():
            model = make_model("qwen3_vl", "truth")
            ids = torch.tensor([[*images.tokens, IMAGE]])
            kinds = (ids == IMAGE).int()
            kinds[0, -1] = 0
            embeddings = model.get_input_embeddings()(ids)
            features = model.get_image_features(images.pixels[0], images.grids)
            (span,) = images.spans
            embeddings[0, span.start : span.stop] = features.pooler_output[0]
            positions, _ = model.model.get_rope_index(ids, kinds, images.grids)
            is_image = kinds.bool()
            deepstack = [
                torch.cat(list(layer)) if isinstance(layer, tuple | list) else layer
                for layer in features.deepstack_features
            ]
            out = model.model.language_model(
                inputs_embeds=embeddings,
                position_ids=positions,
                visual_pos_masks=is_image,
                deepstack_visual_embeds=deepstack,
            )
            truth = model.lm_head(out.last_hidden_state[0, -1]).argmax()
        assert gather(deltas).tokens[1] == truth
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("parts", "change", "message"),
    [
        ((words(0, 3), 1), {"images": ()}, "expected an image for each image token"),
        ((words(0, 3),), {"images": (vision_families.make_image(1),)}, "got 0"),
        ((words(0, 3), 1), {"images": (vision_families.make_image(1),) * 2}, "each of 2 images"),
        ((words(0, 3), 1), {"images": ("a cat",)}, "processor takes, got"),
    ],
    ids=["no image", "no place", "too few places", "no picture"],
)
def test_images_and_places_that_do_not_belong_together_are_refused(engine, parts, change, message):
    request = replace(make_request("a", parts), **change)
    for ask in (engine.check, engine.add):
        with pytest.raises(ConfigError, match=message):
            ask(request)
    assert not engine.has_work


def test_images_side_by_side_are_refused(engine):
    images = (vision_families.make_image(1), vision_families.make_image(2))
    with pytest.raises(ConfigError, match=r"text between them, got \[21\]"):
        engine.prepare_images((9, IMAGE, IMAGE, STOP), images)


def test_a_prompt_too_long_with_its_images_is_refused(engine):
    with pytest.raises(ConfigError, match="context of 256 tokens, got 239"):
        engine.add(make_request("a", (words(0, 222), 1), 20))


def test_tokens_of_another_prompt_are_refused(engine):
    request = make_request("a", (words(0, 3), 1))
    prepared = engine.prepare_images(request.prompt, request.images)
    engine.check(replace(request, prompt=prepared.tokens, images=prepared))
    with pytest.raises(ConfigError, match="prepare_images gave"):
        engine.check(replace(request, images=prepared))


def test_a_model_without_an_image_processor_says_what_is_missing():
    engine = load_engine(make_model("qwen3_vl", "engine"), None, EngineSettings(**SETTINGS))
    try:
        assert not engine.has_images
        with pytest.raises(UnsupportedError, match=r"image processor.*qwen2_5_vl"):
            engine.add(make_request("a", (words(0, 3), 1)))
    finally:
        engine.close()

"""Whatever is scheduled with whom: the tokens are those of model.generate(), in float32."""

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.request import Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.models.text_models import FAMILIES, VOCABULARY, few, make_decoder
from octavo_testkit.serving.tiny_engine import use_padding

PAGE_SIZE = 16
ROOTS = 3  # prompts begin like one of a few, so that prefixes are found


@functools.cache
def make_model(family, role):
    """A model whose tokens depend on all it attends to; the engine's is like that of `expected`."""
    changes = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    if family == "gemma3_text":
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    model = make_decoder(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj.weight" in name and "self_attn" in name:
                parameter.mul_(4)
    return model


@functools.cache
def expected(family, prompt, num_tokens):
    """What generate() answers, greedy."""
    model = make_model(family, "truth")
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(prompt) :].tolist())


@functools.cache
def root(number):
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(2, VOCABULARY, (80,), generator=generator).tolist())


def make_engine(family, **options):
    return load_engine(make_model(family, "engine"), None, EngineSettings(**options))


def draw_request(chance, name, max_length):
    own = tuple(chance.randrange(2, VOCABULARY) for _ in range(chance.choice([0, 1, 5])))
    length = chance.choice([1, 15, 16, 17, 20, chance.randrange(1, 60)])
    prompt = (root(chance.randrange(ROOTS))[:length] + own)[: max_length - 1]
    num_tokens = min(chance.choice([1, 4, 20, 40]), max_length - len(prompt))
    sampling = Sampling(max_tokens=num_tokens, temperature=0)
    return Request(request_id=name, prompt=prompt, sampling=sampling)


def run_randomly(engine, chance, num_requests):
    """Add requests at random times, abort some; returns requests and their deltas."""
    requests, deltas = [], {}
    while len(requests) < num_requests or engine.has_work:
        if len(requests) < num_requests and chance.random() < 0.8:
            request = draw_request(chance, str(len(requests)), engine.max_context)
            engine.add(request)
            requests.append(request)
            deltas[request.request_id] = []
        if requests and chance.random() < 0.05:
            engine.abort(chance.choice(requests).request_id)
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        engine._scheduler.check_invariants()
    return requests, {name: gather(found) for name, found in deltas.items()}


def check(family, requests, completions):
    for request in requests:
        done = completions[request.request_id]
        truth = expected(family, request.prompt, request.sampling.max_tokens)
        if done.finish_reason == "abort":
            assert done.tokens == truth[: len(done.tokens)]
        else:
            assert (done.tokens, done.finish_reason) == (truth, "length")
        assert done.usage.completion_tokens == len(done.tokens)


@pytest.mark.parametrize("family", few("llama", "gpt_oss", "gemma3_text"))
@settings(max_examples=3)
@given(data=st.data())
def test_random_schedules(family, data):
    max_num_seqs = data.draw(st.integers(1, 6), "max_num_seqs")
    engine = make_engine(
        family,
        page_size=PAGE_SIZE,
        num_pages=data.draw(st.integers(4, 10), "num_pages"),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=data.draw(st.sampled_from([max_num_seqs, 7, 40, 200]), "budget"),
        enable_prefix_caching=data.draw(st.booleans(), "caching"),
    )
    if data.draw(st.booleans(), "graphs"):
        use_padding(engine)
    chance = random.Random(data.draw(st.integers(0, 2**16), "seed"))
    try:
        requests, completions = run_randomly(engine, chance, num_requests=5)
        check(family, requests, completions)
        assert engine.stats().num_pages_in_use == 0
    finally:
        engine.close()


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("family", few("llama", "gpt_oss"))
def test_preemption_and_prefix_hits_happen_and_change_nothing(family, has_graphs):
    engine = make_engine(
        family, page_size=PAGE_SIZE, num_pages=7, max_num_seqs=4, max_num_batched_tokens=64
    )
    requests = [
        Request(
            request_id=str(i),
            prompt=root(0)[: 20 + i],
            sampling=Sampling(max_tokens=40, temperature=0),
        )
        for i in range(4)
    ]
    if has_graphs:
        use_padding(engine)
    try:
        deltas = {request.request_id: [] for request in requests}
        for request in requests:
            engine.add(request)
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
        while engine.has_work:
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
            engine._scheduler.check_invariants()
        check(family, requests, {name: gather(found) for name, found in deltas.items()})
        stats = engine.stats()
        assert stats.num_preemptions > 0 and stats.cached_tokens > 0
        assert stats.num_pages_in_use == 0 and stats.num_finished == 4
        assert stats.completion_tokens == 160
    finally:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lost_page_would_be_noticed(family):
    engine = make_engine(family, page_size=PAGE_SIZE, num_pages=12, max_num_seqs=2)
    sampling = Sampling(max_tokens=8, temperature=0)
    request = Request(request_id="a", prompt=root(0)[:40], sampling=sampling)
    try:
        engine.add(request)
        deltas = engine.step()
        sequence = engine._scheduler.running[0]
        # The one with the newest tokens, which windows see, too. (Two pages in each other's place
        # would change nothing: softmax does not know the order of its keys.)
        (sequence.pages[2],) = engine._allocator.allocate(1)
        while engine.has_work:
            deltas += engine.step()
        truth = expected(family, request.prompt, 8)
        assert len(set(truth)) > 4  # a model that says the same for ever would notice nothing
        assert gather(deltas).tokens != truth
    finally:
        engine.close()

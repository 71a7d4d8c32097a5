"""A tiny model with a tokenizer of bytes, and engines for it."""

import functools

import torch

from octavo.serving.engine.decode_graphs import DecodeGraphs
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.request import Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.models.text_models import NUM_TOKENS, make_decoder, make_tokenizer

SETTINGS = {"page_size": 16, "num_pages": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64}
VOCABULARY = NUM_TOKENS


@functools.cache
def tokenizer():
    return make_tokenizer(has_bos=False)


def make_model(family="llama", **changes):
    options = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    return make_decoder(family, **{**options, **changes})


def make_engine(model=None, recipe=None, **changes):
    model = make_model() if model is None else model
    settings = EngineSettings(**{**SETTINGS, **changes})
    return load_engine(model, recipe, settings, tokenizer=tokenizer())


def make_prompt(length, which=0):
    generator = torch.Generator().manual_seed(which)
    return tuple(torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())


def make_request(name="a", length=20, which=0, images=(), prompt=None, **sampling):
    options = {"temperature": 0, "max_tokens": 6, **sampling}
    prompt = make_prompt(length, which) if prompt is None else prompt
    return Request(request_id=name, prompt=prompt, sampling=Sampling(**options), images=images)


def run(engine, *requests):
    """Add the requests and step until all have ended; their completions."""
    for request in requests:
        engine.add(request)
    return finish(engine, [request.request_id for request in requests])


def finish(engine, names):
    deltas = {name: [] for name in names}
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        engine._scheduler.check_invariants()
    return [gather(found) for found in deltas.values()]


def use_padding(engine):
    """Graphs as on a GPU, each replaced by the call that it would hold."""

    def capture(size):
        logits = torch.empty(size, engine._model.vocab_size)
        return (lambda: logits.copy_(graphs._compute(size))), logits

    runner, sizes = engine._runner, engine.settings
    graphs = DecodeGraphs(
        *(runner.model, runner.storage), max_batch=sizes.max_num_seqs, max_context=sizes.max_context
    )
    graphs._capture = capture
    runner.graphs = graphs
    return graphs

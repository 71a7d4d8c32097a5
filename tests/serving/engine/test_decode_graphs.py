"""Decode steps padded to sizes that have graphs: the same tokens, and padding leaves no trace."""

import pytest
import torch

pytest.importorskip("transformers")
import octavo
from octavo.errors import UnsupportedError
from octavo.serving.engine.decode_graphs import batch_sizes
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.request import gather
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.serving.tiny_engine import (
    finish,
    make_engine,
    make_model,
    make_request,
    run,
    use_padding,
)

RECIPES = {
    "plain": None,
    "tensor": octavo.Recipe(kv_cache={"scaling": "unit"}),
    "token": octavo.Recipe(kv_cache={"granularity": "token"}),
}


def answers(engine, **sampling):
    names = [str(i) for i in range(7)]
    for i, name in enumerate(names):
        engine.add(make_request(name, length=1 + 9 * i, which=i, max_tokens=4 + 3 * i, **sampling))
    return [done.tokens for done in finish(engine, names)]


@pytest.mark.parametrize("name", RECIPES)
def test_padded_steps_have_the_same_tokens(name):
    plain = make_engine(recipe=RECIPES[name])
    truth = answers(plain)
    padded = make_engine(recipe=RECIPES[name], num_pages=20, max_num_seqs=3)
    graphs = use_padding(padded)
    assert answers(padded) == truth
    assert graphs.num_replays > 20 and set(graphs._captured) == {1, 2, 3}
    assert padded.stats().num_pages_in_use == 0


def test_padding_writes_no_page():
    engine = make_engine(max_num_seqs=8)
    graphs = use_padding(engine)
    storage = engine._runner.storage
    for pages in (*storage.key_pages, *storage.value_pages):
        pages.fill_(7.0)
    run(engine, *(make_request(str(i), length=3, max_tokens=5) for i in range(3)))
    assert set(graphs._captured) == {4}
    for pages in (*storage.key_pages, *storage.value_pages):
        written = (pages != 7.0).flatten(1).any(1)
        assert written.sum() == 3  # one page of each of the three


def test_what_is_no_decode_step_runs_without_graphs():
    engine = make_engine(max_num_seqs=2)
    graphs = use_padding(engine)
    engine.add(make_request("a", length=20, max_tokens=2))
    engine.step()
    assert graphs.num_replays == 0
    engine.step()
    assert graphs.num_replays == 1


def test_the_next_pass_begins_before_the_tokens_are_read():
    engine = make_engine(max_num_seqs=2)
    use_padding(engine)
    engine.add(make_request("a", length=15, max_tokens=6))
    engine.step()
    assert engine._ahead is None  # after a prompt
    for num_tokens in (2, 3, 4):
        engine.step()
        (sequence,) = engine._scheduler.running
        assert sequence.num_output_tokens == num_tokens
        assert [c.start for c in engine._ahead.batch.chunks] == [sequence.num_computed]
    engine.step()
    assert engine._ahead is not None  # for the last token
    engine.step()
    assert engine._ahead is None and not engine.has_work


def test_a_pass_for_nobody():
    """Requests that end by their own token, or are aborted, while their next pass is under way."""
    plain = make_engine()
    truth = run(plain, make_request("a", max_tokens=20))[0].tokens
    stop = truth[6]
    assert stop not in truth[:6]
    engine = make_engine()
    use_padding(engine)
    requests = [
        make_request("a", max_tokens=20, stop_token_ids=(stop,)),
        make_request("b", which=1, max_tokens=20),
    ]
    for request in requests:
        engine.add(request)
    while engine.stats().num_running != 1:
        engine.step()
    assert len(engine._ahead.batch.chunks) == 2 and len(engine._ahead.batch.open_chunks) == 1
    engine.abort("b")
    # Again, by the same names: what is under way is of others.
    found = run(engine, *requests)
    assert found[0].tokens == truth[:7] and found[0].finish_reason == "stop"
    assert found[1].tokens == run(plain, make_request("b", which=1, max_tokens=20))[0].tokens
    assert engine.stats().num_pages_in_use == 0


@pytest.mark.parametrize(
    "sampling",
    [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.3}],
    ids=str,
)
def test_penalties_wait_for_the_tokens(sampling):
    truth = answers(make_engine(), temperature=0.7, seed=5, **sampling)
    engine = make_engine()
    use_padding(engine)
    engine.add(make_request("z", max_tokens=5, **sampling))
    for _ in range(3):
        engine.step()
        assert engine._ahead is None
    finish(engine, ["z"])
    assert answers(engine, temperature=0.7, seed=5, **sampling) == truth


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.9},
        {"top_k": 7},
        {"min_p": 0.01, "min_tokens": 3},
        {"logprobs": 2},
        {"logit_bias": tuple((token, 2.0 - token % 5) for token in range(300))},
    ],
    ids=str,
)
def test_draws_are_the_same_ahead(sampling):
    truth = answers(make_engine(), temperature=0.7, seed=5, **sampling)
    if "logit_bias" in sampling:
        assert truth != answers(make_engine(), temperature=0.7, seed=5)
    engine = make_engine()
    graphs = use_padding(engine)
    assert answers(engine, temperature=0.7, seed=5, **sampling) == truth
    assert graphs.num_replays > 20


def test_a_row_that_fails_while_its_next_pass_is_under_way(monkeypatch):
    engine = make_engine()
    graphs = use_padding(engine)
    compute = graphs._compute
    monkeypatch.setattr(graphs, "_compute", lambda size: spoil(compute(size), graphs.num_replays))
    found = run(engine, make_request("a", max_tokens=9), make_request("b", which=1, max_tokens=9))
    assert [one.finish_reason for one in found] == ["error", "length"]
    assert len(found[0].tokens) == 4 and len(found[1].tokens) == 9
    assert engine.stats().num_pages_in_use == 0


def test_a_step_that_is_interrupted_loses_no_token(monkeypatch):
    """Ctrl-C while the host waits for tokens whose next pass is under way."""
    (truth,) = run(make_engine(), make_request(max_tokens=9))
    engine = make_engine()
    use_padding(engine)
    engine.add(make_request(max_tokens=9))
    deltas = [*engine.step(), *engine.step()]
    assert engine._ahead is not None

    def interrupt(under_way):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(engine._runner, "read", interrupt)
        engine.step()
    while engine.has_work:
        deltas += engine.step()
    assert gather(deltas).tokens == truth.tokens
    assert engine.stats().num_pages_in_use == 0


def spoil(logits, num_replays):
    if num_replays == 3:
        logits[0] = float("nan")
    return logits


def test_a_chunk_of_one_token_that_samples_nothing():
    """A long prompt beside a decoding request may get one token of a step."""
    truth = [one.tokens for one in run(make_engine(), *mixed_requests())]
    engine = make_engine(max_num_batched_tokens=2, max_num_seqs=2)
    graphs = use_padding(engine)
    assert [one.tokens for one in run(engine, *mixed_requests())] == truth
    assert graphs.num_replays > 20


def mixed_requests():
    return make_request("a", length=3, max_tokens=30), make_request("b", length=25, which=1)


def test_a_model_that_no_graph_can_hold(monkeypatch, caplog):
    def fail(self, size):
        raise UnsupportedError("expected a model whose decode step a CUDA graph can hold")

    truth = answers(make_engine())
    engine = make_engine()
    use_padding(engine)
    monkeypatch.setattr(engine._runner.graphs, "_capture", lambda size: fail(None, size))
    assert answers(engine) == truth
    assert engine._runner.graphs is None
    assert caplog.text.count("decode steps run without CUDA graphs") == 1
    engine = make_engine()
    use_padding(engine)
    engine._runner._needs_graphs = True
    monkeypatch.setattr(engine._runner.graphs, "_capture", lambda size: fail(None, size))
    (found,) = run(engine, make_request(max_tokens=3))
    assert found.finish_reason == "error"


def test_graphs_that_are_asked_for_need_a_gpu():
    with pytest.raises(UnsupportedError, match="CUDA graphs need a CUDA GPU, got a model on cpu"):
        make_engine(cuda_graphs=True)
    assert make_engine(cuda_graphs=None)._runner.graphs is None


@pytest.mark.parametrize("max_batch", [1, 2, 3, 8, 9, 60, 64, 256, 1000])
def test_batch_sizes(max_batch):
    sizes = batch_sizes(max_batch)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == min(max_batch, 256)
    for batch in range(1, sizes[-1] + 1):
        assert next(size for size in sizes if size >= batch) <= max(batch * 1.5, batch + 7)


def test_all_graphs_at_once():
    engine = make_engine(max_num_seqs=4)
    graphs = use_padding(engine)
    seen = []
    graphs.warm_up(lambda sizes: [seen.append(size) or size for size in sizes])
    assert seen == [4, 2, 1] and set(graphs._captured) == {1, 2, 4}


# The compiler's own imports use what torch has deprecated; which ones depends on the version.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_compiled_layers_have_the_same_tokens(family):
    truth = answers(make_engine(make_model(family)))
    model = make_model(family)
    engine = make_engine(model, compile=True)
    layers = engine._model._decoder.layers
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert answers(engine) == truth
    engine.close()
    assert all(layer._compiled_call_impl is None for layer in layers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_are_compiled_for_one_token_and_for_more():
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    model = make_model("llama")
    engine = make_engine(model, compile=True)
    num_graphs = counters["unique_graphs"]
    assert num_graphs > 0
    answers(engine)
    engine.close()
    assert counters["unique_graphs"] == 2 * num_graphs
    answers(make_engine(model, compile=True))
    assert counters["unique_graphs"] == 2 * num_graphs


SIZES = {"head_dim": 64, "hidden_size": 256}


def on_gpu(name, dtype, **changes):
    model = make_model(**SIZES).to("cuda", dtype)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 32, **changes}
    return load_engine(model, RECIPES[name], EngineSettings(**options))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_graphs_have_the_tokens_of_steps_without(name, dtype):
    plain = on_gpu(name, dtype, cuda_graphs=False)
    truth = answers(plain)
    plain.close()
    engine = on_gpu(name, dtype, cuda_graphs=True)
    assert answers(engine) == truth
    assert answers(engine, seed=3, temperature=0.5)
    graphs = engine._runner.graphs
    assert graphs.num_replays > 20 and set(graphs._captured) == {1, 2, 4}
    engine.close()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_graphs_of_compiled_layers_on_a_gpu():
    plain = on_gpu("plain", torch.float32, cuda_graphs=False)
    truth = answers(plain)
    plain.close()
    engine = on_gpu("plain", torch.float32, cuda_graphs=True, compile=True)
    assert answers(engine) == truth
    engine.close()

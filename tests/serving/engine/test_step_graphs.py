"""Steps padded to shapes that have graphs: the same tokens, and padding leaves no trace."""

import gc

import numpy
import pytest
import torch

pytest.importorskip("transformers")
import octavo
from octavo import ops
from octavo.errors import UnsupportedError
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.request import gather
from octavo.serving.engine.scheduler import Batch, Chunk
from octavo.serving.engine.sequence import Sequence
from octavo.serving.engine.settings import EngineSettings
from octavo.serving.engine.step_graphs import (
    Shape,
    batch_sizes,
    choose_room,
    choose_shapes,
    memory_of_graphs,
    token_counts,
)
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


def sizes_of(graphs):
    """The batch sizes of graphs that were captured of steps that only decode."""
    return {shape.num_tokens for shape in graphs._captured if not shape.num_prompts}


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
    assert graphs.num_replays == padded.stats().num_steps and sizes_of(graphs) == {1, 2, 3}
    assert padded.stats().num_pages_in_use == 0


def test_padding_writes_no_page():
    engine = make_engine(max_num_seqs=8)
    graphs = use_padding(engine)
    storage = engine._runner.storage
    for pages in (*storage.key_pages, *storage.value_pages):
        pages.fill_(7.0)
    run(engine, *(make_request(str(i), length=3, max_tokens=5) for i in range(3)))
    assert sizes_of(graphs) == {4} and len(graphs._captured) == 2
    for pages in (*storage.key_pages, *storage.value_pages):
        written = (pages != 7.0).flatten(1).any(1)
        assert written.sum() == 3  # one page of each of the three


def test_the_next_pass_begins_before_the_tokens_are_read():
    engine = make_engine(max_num_seqs=2)
    graphs = use_padding(engine)
    engine.add(make_request("a", length=15, max_tokens=6))
    engine.step()
    assert engine._ahead is None  # its graph might have to be captured, and that may fail
    for num_tokens in (2, 3, 4):
        engine.step()
        (sequence,) = engine._scheduler.running
        assert sequence.num_output_tokens == num_tokens
        assert [c.start for c in engine._ahead.batch.chunks] == [sequence.num_computed]
    engine.step()
    assert engine._ahead is not None  # for the last token
    engine.step()
    assert engine._ahead is None and not engine.has_work
    engine.add(make_request("b", length=15, which=1, max_tokens=6))
    engine.step()
    assert engine._ahead is not None  # after a prompt, too, now that the graph is there
    assert finish(engine, ["b"])[0].tokens
    assert graphs.num_replays == engine.stats().num_steps


def test_the_pass_after_prompts_has_their_tokens():
    plain, engine = make_engine(), make_engine()
    use_padding(engine)
    truth = answers(plain)
    assert answers(engine) == truth  # captured meanwhile
    assert answers(engine) == truth


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
    monkeypatch.setattr(graphs, "_compute", lambda shape: spoil(compute(shape), graphs))
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


def spoil(_, graphs):
    if graphs.num_replays == 4:
        graphs._logits[0] = float("nan")


def test_a_chunk_of_one_token_that_samples_nothing():
    """A long prompt beside a decoding request may get one token of a step."""
    truth = [one.tokens for one in run(make_engine(), *mixed_requests())]
    engine = make_engine(max_num_batched_tokens=2, max_num_seqs=2)
    graphs = use_padding(engine)
    assert [one.tokens for one in run(engine, *mixed_requests())] == truth
    assert graphs.num_replays > 20


def mixed_requests():
    return make_request("a", length=3, max_tokens=30), make_request("b", length=25, which=1)


def refuse(has_prompts, graphs):
    """Let captures of steps with prompts fail, or of those without."""
    capture = graphs._capture

    def refusing(shape):
        if bool(shape.num_prompts) == has_prompts:
            raise UnsupportedError("expected a model of which a CUDA graph can hold a step")
        return capture(shape)

    graphs._capture = refusing


@pytest.mark.parametrize("has_prompts", [False, True])
def test_a_model_of_which_no_graph_can_hold_some_steps(has_prompts, caplog):
    truth = answers(make_engine())
    engine = make_engine()
    graphs = use_padding(engine)
    refuse(has_prompts, graphs)
    assert answers(engine) == truth
    assert engine.has_graphs
    assert {bool(shape.num_prompts) for shape in graphs._captured} == {not has_prompts}
    kind = "steps with prompts" if has_prompts else "decode steps"
    assert caplog.text.count(f"{kind} run without CUDA graphs") == 1


def test_a_model_that_no_graph_can_hold(caplog):
    truth = answers(make_engine())
    engine = make_engine()
    graphs = use_padding(engine)
    refuse(True, graphs)
    refuse(False, graphs)
    assert answers(engine) == truth
    assert not engine.has_graphs and graphs.num_replays == 0
    engine.warm_up()  # nothing is left to capture
    assert caplog.text.count("run without CUDA graphs") == 2
    engine = make_engine()
    refuse(True, use_padding(engine))
    engine._runner._needs_graphs = True
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


@pytest.mark.parametrize("max_tokens", [1, 15, 16, 64, 100, 2048, 3000, 16384])
def test_token_counts(max_tokens):
    counts = token_counts(max_tokens)
    assert list(counts) == sorted(set(counts)) and counts[-1] == min(max_tokens, 4096)
    for tokens in range(16, counts[-1] + 1):
        count = next(count for count in counts if count >= tokens)
        assert count <= 1.51 * tokens and count - tokens < 512


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(1, 1), (3, 3), (4, 64), (256, 2048)])
def test_shapes(max_batch, max_tokens):
    shapes = choose_shapes(max_batch, max_tokens)
    assert len(shapes) == len(set(shapes))
    assert [s.num_tokens for s in shapes] == sorted(s.num_tokens for s in shapes)
    assert any(s.num_tokens == max_tokens and s.num_single == max_batch for s in shapes)
    for shape in shapes:
        assert shape.num_logits <= min(shape.num_tokens, max_batch)
        # Sequences with more than one token are at most half as many as tokens.
        assert shape.num_prompts <= max(1, shape.num_tokens // 2)
        if not shape.num_prompts:
            assert shape.num_tokens == shape.num_single == shape.num_logits


def test_all_usual_graphs_at_once():
    engine = make_engine(max_num_seqs=16)
    graphs = use_padding(engine)
    seen = []
    engine.warm_up(lambda shapes: [seen.append(shape) or shape for shape in shapes])
    tokens = [shape.num_tokens for shape in seen]
    assert tokens == sorted(tokens, reverse=True) and set(seen) == set(graphs._captured)
    assert {shape.num_tokens for shape in seen} == {*batch_sizes(16), *token_counts(64)}
    assert max(shape.num_prompts for shape in seen) == 8
    stats = engine.stats()
    assert answers(engine) == answers(make_engine())
    assert set(graphs._captured) == set(seen)
    assert stats.num_steps == 0


FAMILIES = {"llama": "llama", "windows": "gemma3_text", "sinks": "gpt_oss", "biases": "qwen2"}


def random_requests(generator, count):
    """Prompts of all lengths, some of which begin alike, and answers of all lengths."""
    whole = make_request(length=40).prompt
    for index in range(count):
        length, answer = (int(generator.integers(1, most)) for most in (40, 30))
        shared = int(generator.choice([0, 20, 40]))
        prompt = (*whole[:shared], *make_request(length=length, which=index + 1).prompt)
        yield make_request(str(index), prompt=prompt, max_tokens=answer)


def serve_randomly(engine, seed, count=10):
    """Answers to random requests that come in random steps."""
    generator = numpy.random.default_rng(seed)
    waiting = list(random_requests(generator, count))
    deltas = {request.request_id: [] for request in waiting}
    while waiting or engine.has_work:
        if waiting and (generator.random() < 0.7 or not engine.has_work):
            engine.add(waiting.pop(0))
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        engine._scheduler.check_invariants()
    return [gather(found).tokens for found in deltas.values()]


CROWDED = {"num_pages": 8, "max_num_seqs": 5, "max_num_batched_tokens": 24}


def poison(engine):
    """Make what was never written not a number: whatever reads it has it in its result."""
    storage = engine._runner.storage
    for pages in (*storage.key_pages, *storage.value_pages):
        if pages.dtype.itemsize > 1:
            pages[1:].fill_(torch.nan)
        else:
            pages.view(torch.uint8)[1:].fill_(0x7F)


QUICK = {"windows", "sinks"}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in FAMILIES]
)
def test_random_schedules_have_the_same_tokens(family, seed):
    model = make_model(FAMILIES[family])
    plain = make_engine(model, **CROWDED)
    truth = serve_randomly(plain, seed)
    plain.close()
    engine = make_engine(model, **CROWDED)
    graphs = use_padding(engine)
    poison(engine)
    assert serve_randomly(engine, seed) == truth
    stats = engine.stats()
    assert graphs.num_replays >= stats.num_steps > 20
    assert stats.cached_tokens > 0 and stats.num_pages_in_use == 0
    assert stats.num_preemptions > 0 or seed > 0
    assert len([shape for shape in graphs._captured if shape.num_prompts]) > 1


def logits_both_ways(engine, batches):
    """The logits of batches without graphs and with, and what both left in the pages."""
    runner, graphs = engine._runner, engine._runner.graphs
    storage = runner.storage
    tensors = (*storage.key_pages, *storage.value_pages, *storage.key_scales, *storage.value_scales)
    found = []
    for is_graph in (False, True):
        for x in tensors[: 2 * storage.spec.num_layers]:
            x.zero_()
        runner.graphs = graphs if is_graph else None
        logits = [runner.run(batch).clone() for batch in batches]
        counts = [layer.saturated.clone() for layer in engine._model.attention]
        for layer in engine._model.attention:
            layer.saturated.zero_()
        found.append((logits, [x.clone() for x in tensors], counts))
    return found


def chunks(*sizes, page_size=16):
    """Chunks (start, tokens), each of a sequence with pages of its own."""
    made, page = [], 0
    for index, (start, num_tokens) in enumerate(sizes):
        sequence = Sequence(make_request(str(index), length=90, which=index), index)
        sequence.pages.extend(range(page, page + 6))
        page += 6
        made.append(Chunk(sequence, start, num_tokens, samples=index % 3 != 1))
    return Batch(tuple(sorted(made, key=lambda chunk: chunk.num_tokens > 1)))


SCALES = {
    **RECIPES,
    "e5m2": octavo.Recipe(kv_cache={"scaling": "unit", "format": "e5m2"}),
    "rotated": octavo.Recipe(kv_cache={"granularity": "token", "rotate_keys": True}),
}


@pytest.mark.filterwarnings("ignore:.*beyond the range")
@pytest.mark.parametrize("name", SCALES)
def test_padding_leaves_no_trace(name):
    """Logits, pages, scales and counts of saturated values, whatever the step is made of."""
    model = make_model("qwen2")
    with torch.no_grad():
        for part in model.modules():  # tokens that differ in size, and values beyond a scale of 1
            if getattr(part, "bias", None) is not None:
                part.bias.normal_(std=3e4 if name == "e5m2" else 300)
        model.get_input_embeddings().weight[0] *= 50  # what padding is
    engine = make_engine(model, SCALES[name], max_num_seqs=6)
    graphs = use_padding(engine)
    first = chunks((0, 30), (0, 21), (0, 9), (0, 1))
    second = chunks((30, 1), (21, 18), (9, 1), (1, 3))
    third = chunks((31, 1), (39, 1), (10, 1), (4, 1))
    plain, padded = logits_both_ways(engine, (first, second, third, first))
    assert graphs.num_replays == 4
    for own, expected in zip(padded[0], plain[0], strict=True):
        assert expected.isfinite().all()
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())
    counts = torch.stack(plain[2])
    assert counts.any() == (name in ("tensor", "e5m2"))
    assert torch.equal(torch.stack(padded[2]), counts)
    for own, expected in zip(padded[1], plain[1], strict=True):
        # Where nothing was written, nothing is, and what was written is the same but for rounding.
        assert torch.equal(own.float() == 0, expected.float() == 0)
        torch.testing.assert_close(own.float(), expected.float(), rtol=0.26, atol=1e-2)


def test_a_scale_for_all_queries_does_not_see_padding(monkeypatch):
    seen = []
    quantize = ops.quantize
    monkeypatch.setattr(
        ops, "quantize", lambda q, *a, **k: seen.append(q.abs().amax()) or quantize(q, *a, **k)
    )
    engine = make_engine(make_model("qwen2"), RECIPES["tensor"])
    use_padding(engine)
    batch = chunks((0, 1), (0, 17), (0, 6))
    logits_both_ways(engine, (batch,))
    num_layers = len(engine._model.attention)
    plain, padded = seen[:num_layers], seen[-num_layers:]
    assert torch.allclose(torch.stack(plain), torch.stack(padded))


def test_what_runs_without_graphs():
    engine = make_engine(max_num_seqs=8, num_pages=64)
    graphs = use_padding(engine)
    assert graphs.find(chunks((0, 60))) == Shape(64, 8, 8, 8)
    assert graphs.find(chunks((0, 60), (0, 5))) is None  # more tokens than max_num_batched_tokens
    assert graphs.find(chunks(*[(5, 1)] * 8)) == Shape(8, 8, 0, 8)
    graphs.room = 30
    assert graphs.find(chunks((0, 20), (80, 1))) is not None  # what decodes needs no room
    assert graphs.find(chunks((0, 20), (0, 11))) is None
    batch = chunks((0, 20))
    batch.chunks[0].sequence.image_stop = 7
    assert graphs.find(batch) is None
    assert graphs.find(chunks(*[(1, 1)] * 9)) is None


def test_room_is_bounded():
    engine = make_engine(num_pages=7)
    assert use_padding(engine).room == 7 * 16
    big = EngineModel(make_model(num_attention_heads=16, num_key_value_heads=16, head_dim=256))
    spec = big.cache_spec(64)
    assert choose_room(big, spec) == 2**28 // (2 * 16 * 256 * 4)
    assert memory_of_graphs(big, spec, 1000) == 1000 + 2**28
    big.close()
    small = EngineModel(make_model(), RECIPES["tensor"])
    assert choose_room(small, small.cache_spec(64)) == 2**16
    small.close()


def test_a_model_that_would_see_padding_is_not_padded():
    model = make_model("qwen2", hidden_size=64, intermediate_size=64)
    recipe = octavo.Recipe(linear={"activation": "tensor"})
    plain = make_engine(model, recipe)
    engine = make_engine(model, recipe)
    graphs = use_padding(engine)
    assert engine._model.sees_padding and not make_engine()._model.sees_padding
    assert graphs.find(chunks((5, 1))) == Shape(1, 1, 0, 1)
    assert graphs.find(chunks((5, 1), (6, 1), (7, 1))) is None
    assert answers(engine) == answers(plain)
    assert 0 < graphs.num_replays < engine.stats().num_steps


@pytest.mark.slow
def test_a_thousand_steps_leave_nothing_behind():
    """No tensors and no graphs but those of the shapes, whatever steps there were."""
    engine = make_engine(make_model(num_hidden_layers=1), **CROWDED)
    graphs = use_padding(engine)
    num_tensors = []
    for seed in range(8):
        serve_randomly(engine, seed, count=20)
        gc.collect()
        num_tensors.append(sum(type(x) is torch.Tensor for x in gc.get_objects()))
    assert engine.stats().num_steps > 1000
    assert len(graphs._captured) <= len(graphs.shapes)
    assert num_tensors[-1] <= num_tensors[3]
    assert engine.stats().num_pages_in_use == 0


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
def test_nothing_is_left_to_compile_while_requests_run():
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    model = make_model("llama")
    engine = make_engine(model, compile=True)
    num_graphs = counters["unique_graphs"]
    assert num_graphs > 0
    answers(engine)
    graphs = use_padding(engine)  # they hold what was compiled for steps without
    answers(engine)
    engine.close()
    assert graphs.num_replays > 20 and counters["unique_graphs"] == num_graphs
    answers(make_engine(model, compile=True))
    assert counters["unique_graphs"] == num_graphs


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
    found = answers(engine)
    if dtype == torch.float32:
        assert found == truth
    # A padded product may round otherwise, and bf16 has few logits between two tokens.
    num_alike = sum(own[0] == other[0] for own, other in zip(found, truth, strict=True))
    assert num_alike >= 4
    assert answers(engine, seed=3, temperature=0.5)
    graphs = engine._runner.graphs
    assert graphs.num_replays >= engine.stats().num_steps and sizes_of(graphs) == {1, 2, 4}
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


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_random_schedules_have_the_same_tokens_on_a_gpu(family):
    """Chunks, mixed steps, preemption and known pages, in float32."""
    model = make_model(family, **SIZES).to("cuda")
    crowded = {**CROWDED, "page_size": 16}
    for seed in range(3):
        plain = load_engine(model, None, EngineSettings(**crowded, cuda_graphs=False))
        truth = serve_randomly(plain, seed)
        plain.close()
        engine = load_engine(model, None, EngineSettings(**crowded, cuda_graphs=True))
        assert serve_randomly(engine, seed) == truth
        stats, graphs = engine.stats(), engine._runner.graphs
        assert graphs.num_replays >= stats.num_steps > 20 and stats.num_pages_in_use == 0
        assert [shape for shape in graphs._captured if shape.num_prompts]
        engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCALES)
def test_padding_leaves_no_trace_on_a_gpu(name):
    """Logits and counts of saturated values of mixed steps, by graphs and without."""
    model = make_model("qwen2", **SIZES)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] *= 50  # what padding is
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "num_pages": 32, "page_size": 16}
    model = model.to("cuda", torch.bfloat16)
    engine = load_engine(model, SCALES[name], EngineSettings(**options))
    batches = (
        chunks((0, 30), (0, 21), (0, 9), (0, 1)),
        chunks((30, 1), (21, 18), (9, 1), (1, 3)),
        chunks((31, 1), (39, 1), (10, 1), (4, 1)),
    )
    graphs = engine._runner.graphs
    plain, padded = logits_both_ways(engine, batches)
    assert graphs.num_replays == len(batches) and engine.has_graphs
    for own, expected in zip(padded[0], plain[0], strict=True):
        assert expected.isfinite().all()
        error = (own.float() - expected.float()).square().mean().sqrt()
        assert error <= 0.1 * expected.float().square().mean().sqrt()
    assert torch.equal(torch.stack(padded[2]) > 0, torch.stack(plain[2]) > 0)
    engine.close()


@pytest.mark.gpu
def test_a_thousand_steps_take_no_more_memory_on_a_gpu():
    model = make_model(**SIZES).to("cuda", torch.bfloat16)
    recipe = octavo.Recipe(kv_cache={"granularity": "token"})
    options = {"num_pages": 24, "max_num_seqs": 8, "max_num_batched_tokens": 96, "page_size": 16}
    engine = load_engine(model, recipe, EngineSettings(**options, cuda_graphs=True))
    engine.warm_up()
    reserved = []
    while engine.stats().num_steps < 1500:
        serve_randomly(engine, len(reserved), count=16)
        torch.cuda.synchronize()
        reserved.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert engine._runner.graphs.num_replays >= engine.stats().num_steps
    middle = reserved[len(reserved) // 2]
    assert reserved[-1][0] <= middle[0] + 2**20 and reserved[-1][1] <= middle[1] + 2**21
    engine.close()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_gpu():
    engine = on_gpu("token", torch.bfloat16, cuda_graphs=True)
    graphs = engine._runner.graphs
    engine.add(make_request("a", length=40, max_tokens=2))
    batch = engine._scheduler.schedule()
    shape = graphs.find(batch)
    with torch.inference_mode():
        graphs.run(batch, shape)  # everything is compiled and captured
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            graphs.run(batch, shape)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()

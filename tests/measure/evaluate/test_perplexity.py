"""Perplexity through the KV cache: what counts, what a row does, and what is left as it was."""

import contextlib
import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")


from octavo import Recipe
from octavo.errors import ConfigError
from octavo.integrations.apply import apply_
from octavo.integrations.transformers.text_model import TextModel
from octavo.measure.evaluate import perplexity as task
from octavo.measure.evaluate.language import (
    PLAIN_KEYS,
    Keys,
    calibration_scales,
    local_participants,
    local_rows,
    model_about,
)
from octavo.measure.evaluate.perplexity import Reading, window_losses
from octavo.measure.evaluate.requests import LanguageRequest, PerplexityRequest
from octavo.measure.rows import Row
from octavo.measure.run import Records, run_workload
from octavo_testkit.models.text_models import make_decoder, make_prompts

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

WINDOWS = [make_prompts(1, 70, seed)["input_ids"][0] for seed in (1, 2, 3)]


def losses(model, window):
    """Of every token but the first, in one pass without a cache."""
    with torch.no_grad():
        logits = model(window[None], use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("chunk", [1, 7, 23, 69, 100])
def test_a_text_in_chunks_has_the_loss_of_one_pass(family, chunk):
    model = make_decoder(family)
    expected = losses(model, WINDOWS[0])
    counted = {
        "all": slice(None),
        "later": slice(chunk, None),
        "last": slice(68 // chunk * chunk, None),
    }
    for count, part in counted.items():
        if len(expected[part]) == 0:
            continue
        (found,) = window_losses(model, WINDOWS[:1], Reading(chunk=chunk, count=count))
        assert found == pytest.approx(float(expected[part].mean()), rel=1e-5)


@pytest.mark.parametrize("recipe", [None, Recipe(kv_cache={"granularity": "token"})])
def test_windows_side_by_side(recipe):
    model = make_decoder("llama")
    if recipe is not None:
        apply_(model, recipe)
    windows = [WINDOWS[0], WINDOWS[1], WINDOWS[0].flip(0)]
    one = window_losses(model, windows, Reading(chunk=4))
    assert window_losses(model, windows, Reading(chunk=4, batch=2)) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("recipe", [None, Recipe(kv_cache={"granularity": "token"})])
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_cache_that_never_moves_reads_the_same(recipe, chunk, monkeypatch):
    """As on a GPU, where passes are replayed, but without a graph."""
    model = make_decoder("llama")
    if recipe is not None:
        apply_(model, recipe)
    expected = window_losses(model, WINDOWS, Reading(chunk=chunk, batch=2))
    monkeypatch.setattr(task, "NUM_WARMUPS", 1000)
    monkeypatch.setattr(
        task,
        "_Passes",
        lambda model: task._Replays(model, 2, len(WINDOWS[0]), chunk),
    )
    found = window_losses(model, WINDOWS[:2], Reading(chunk=chunk, batch=2))
    assert found == pytest.approx(expected[:2], rel=1e-5)


@pytest.mark.parametrize("recipe", [None, Recipe(kv_cache={"granularity": "token"})])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_replays_know_nothing_that_only_the_host_counts(family, recipe, monkeypatch):
    """Layers with a window count tokens on the host, where a replay finds the capture's number."""
    model = make_decoder(family, **({} if family == "llama" else {"sliding_window": 32}))
    if recipe is not None:
        apply_(model, recipe)
    expected = window_losses(model, WINDOWS[:2], Reading(chunk=3, batch=2))
    readers = []

    def make_reader(model):
        readers.append(task._Replays(model, 2, len(WINDOWS[0]), 3))
        return readers[-1]

    class Graph:
        def replay(self):
            reader = readers[-1]
            for layer, count in zip(reader.cache.layers, self.counts, strict=True):
                if count is not None:
                    layer.cumulative_length_int = count
            reader.logits.copy_(reader._call(reader.ids, reader.positions))

    @contextlib.contextmanager
    def capture(graph):
        before = copy.deepcopy(readers[-1].cache.layers)
        graph.counts = [getattr(layer, "cumulative_length_int", None) for layer in before]
        yield
        readers[-1].cache.layers = before

    monkeypatch.setattr(task, "_Passes", make_reader)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    found = window_losses(model, WINDOWS[:2], Reading(chunk=3, batch=2))
    assert found == pytest.approx(expected, rel=1e-5)
    is_stock_window = recipe is None and family != "llama"
    assert (readers[-1].graph is None) == is_stock_window


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe",
    [None, {"granularity": "token"}, {"scaling": "unit", "rotate_keys": True}],
    ids=str,
)
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_replays_read_what_passes_read(family, recipe, chunk, monkeypatch):
    sizes = {"head_dim": 64, **({} if family == "llama" else {"sliding_window": 32})}
    model = make_decoder(family, **sizes).to("cuda", torch.bfloat16)
    if recipe is not None:
        apply_(model, Recipe(kv_cache=recipe))
    windows = [torch.randint(2, 60, (200,)) for _ in range(3)]
    found = window_losses(model, windows, Reading(chunk=chunk, batch=3))
    monkeypatch.setattr(task, "MAX_QUERY_TOKENS", 0)
    expected = window_losses(model, windows, Reading(chunk=chunk, batch=3))
    assert found == pytest.approx(expected, rel=1e-2)


def test_what_counts_is_never_nothing():
    for reading, context in ((Reading(chunk=8), 9), (Reading(chunk=8, count="all"), 1)):
        with pytest.raises(ConfigError, match="predictions to count"):
            reading.passes(context)
    Reading(chunk=8).passes(10)
    Reading(chunk=8, count="all").passes(2)
    for wrong in ({"chunk": 0}, {"batch_size": 0}):
        with pytest.raises(ConfigError, match="of 1 or more, got 0"):
            PerplexityRequest(data=Path("text"), **wrong)


def make_rows(names, scales, *, dtype="baseline", **options):
    request = LanguageRequest(recipe=tuple(names), **options)
    return [row for _, row in local_rows(request, SimpleNamespace(dtype=dtype), scales)]


READING = Reading(chunk=16)


def evaluate(model, rows, records=None, *, windows=WINDOWS, reading=READING, **options):
    about = model_about(TextModel("tiny", model, None))
    workload = task.make_workload(windows, reading, "words", "octavo eval perplexity", **options)
    return run_workload(local_participants(rows, model, about), workload, records)


def test_recovery_is_the_ratio_of_perplexities():
    model = make_decoder("llama")
    scales = calibration_scales(TextModel("tiny", model, None), WINDOWS[2:], data="words")
    names = ["baseline", "tensor", "head", "token", "unit", "head+skip=0-1", "token+skip=1+skip=3"]
    rows = make_rows(names, {PLAIN_KEYS: scales}, dtype="float32")
    assert rows[5].recipe().skip_layers == ("0-1",) and rows[6].recipe().skip_layers == ("1", "3")
    seen, steps = [], []
    records = evaluate(model, rows, records=Records(on_record=seen.append), on_step=steps.append)
    assert seen == records and sum(steps) == 7 * 3 * 69
    first = records[0]
    mean = sum(float(losses(model, w)[16:].mean()) for w in WINDOWS) / 3
    assert first.values["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
    assert "recovery_percent" not in first.values and first.baseline is None
    assert first.case["recipe"] == first.case["dtype"] == "float32"
    for record in records[1:]:
        ratio = record.values["perplexity"] / first.values["perplexity"]
        assert record.values["recovery_percent"] == pytest.approx(100 / ratio, rel=1e-9)
        assert record.values["perplexity_ratio"] == pytest.approx(ratio, rel=1e-9)
        assert 0 < abs(ratio - 1) < 0.05 and record.baseline == "float32"
        assert 0 < record.values["recovery_standard_error_percent"] < 5
    text = "\n".join(" ".join(row) for row in task.perplexity_table(records).texts())
    assert "fp8 head+skip=0-1" in text and f"{records[1].values['recovery_percent']:.3f}" in text


def test_a_row_that_ruins_the_cache_is_seen():
    model = make_decoder("llama")
    tiny = {f"model.layers.{i}.self_attn": dict.fromkeys("qkv", 1e-4) for i in range(4)}
    broken = Recipe(kv_cache={"scaling": "static"}, scales=tiny)  # everything saturates
    fine = Recipe(kv_cache={"granularity": "token"})
    rows = [Row.of("own", None), Row.of("fine", fine), Row.of("broken", broken)]
    _, good, bad = (record.values for record in evaluate(model, rows))
    assert abs(good["recovery_percent"] - 100) < 1 < abs(bad["recovery_percent"] - 100)


def test_the_model_is_left_as_it_came_even_after_an_error():
    model = make_decoder("llama")
    before = losses(model, WINDOWS[0])

    def stop(num_tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, [Row.of("token", Recipe(kv_cache={"granularity": "token"}))], on_step=stop)
    assert torch.equal(losses(model, WINDOWS[0]), before)
    assert not hasattr(model.model.layers[0].self_attn, "octavo_attention")


def test_one_window_has_no_standard_error():
    assert task._values([1.0], [1.0], False) == {
        "perplexity": math.e,
        "recovery_percent": 100.0,
        "perplexity_ratio": 1.0,
    }
    assert task._values([math.inf], [1.0], False)["perplexity"] == math.inf
    assert math.isnan(task._values([math.nan], [1.0], False)["perplexity"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["head", "head"], "different rows"),
        (["int8"], "baseline, unit, tensor, head, token, .*got 'int8'"),
        (["baseline+skip=1"], "baseline quantizes nothing"),
        (["unit+center"], "center_keys takes the means"),
        (["head+turn"], r"row head\+turn: expected words out of"),
        (["nowhere.json+rotate"], "nowhere.json"),
        (["token+center"], r"row token\+center, of keys with center, got none"),
        (["head"], "expected scales for the row head"),
        (["nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_rows(names, message):
    with pytest.raises(ConfigError, match=message):
        make_rows(names, {})


def test_a_row_of_a_recipe_file(tmp_path):
    recipe = Recipe(kv_cache="fp8_e5m2", skip_layers=["0"])
    recipe.save(tmp_path / "r.toml")
    rows = make_rows([f"{tmp_path}/r.toml", f"{tmp_path}/r.toml+skip=2"], {})
    assert rows[0].recipe() == recipe and rows[1].recipe().skip_layers == ("0", "2")
    assert make_rows(["unit"], {}, kv_cache_dtype="fp8_e5m2")[0].recipe().kv_cache.format == "e5m2"
    with pytest.raises(ConfigError, match="got 'int8'"):
        make_rows(["unit"], {}, kv_cache_dtype="int8")


def test_rows_with_rotated_and_centered_keys():
    model = make_decoder("llama")
    both, rotated = Keys(rotate_keys=True, center_keys=True), Keys(rotate_keys=True)
    text_model, told = TextModel("tiny", model, None), []
    scales = {
        keys: calibration_scales(
            *(text_model, WINDOWS[2:], keys), data="words", on_window=told.append
        )
        for keys in (both, rotated)
    }
    num = len(WINDOWS[2:])
    assert told == [*range(1, 2 * num + 1), *range(1, num + 1)]
    assert [Keys.of(found) for found in scales.values()] == [both, rotated]
    names = ["baseline", "tensor+rotate+center", "head+center+rotate+skip=0", "head+rotate"]
    names += ["token+rotate+center", "token+center", "token+rotate", "unit+rotate"]
    rows = make_rows(names, scales)
    settings = [row.recipe().kv_cache for row in rows[1:]]
    assert [s.center_keys for s in settings] == [True, True, False, True, True, False, False]
    assert [s.rotate_keys for s in settings] == [True, True, True, True, False, True, True]
    assert rows[2].name == "fp8 head+center+rotate+skip=0"
    assert rows[2].recipe().skip_layers == ("0",)
    assert [row.recipe().is_static for row in rows[1:]] == [True] * 5 + [False] * 2
    for record in evaluate(model, rows)[1:]:
        assert 0 < abs(record.values["perplexity_ratio"] - 1) < 0.05
    with pytest.raises(ConfigError, match="of keys as they are, got keys with rotate and center"):
        make_rows(["head"], scales)


def test_up_to_four_tokens_at_a_time_are_decoded():
    model = make_decoder("llama")
    row = Row.of("token", Recipe(kv_cache={"granularity": "token"}))
    found = {}
    for chunk in (1, 4, 5):
        reading = Reading(chunk=chunk, count="all")
        (record,) = evaluate(model, [row], windows=WINDOWS[:1], reading=reading)
        found[chunk] = record.values["perplexity"]
    assert found[4] == pytest.approx(found[1], rel=1e-6)
    assert abs(found[5] / found[1] - 1) > 1e-5

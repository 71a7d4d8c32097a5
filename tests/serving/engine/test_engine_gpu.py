"""The engine on a GPU: BF16 pages against generate(), FP8 pages, a cache sized from memory."""

import pytest
import torch

pytest.importorskip("transformers")
import octavo
from octavo.layers.linear import OneTokenLinear
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.serving.tiny_engine import finish, make_model, make_request

pytestmark = pytest.mark.gpu
SIZES = {"head_dim": 64, "hidden_size": 256}
SPARE = 16 * 2**30


def make_engine(recipe=None, dtype=torch.bfloat16, **changes):
    model = make_model(**SIZES).to("cuda", dtype)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 32, **changes}
    return load_engine(model, recipe, EngineSettings(**settings))


def answers(engine):
    names = [str(i) for i in range(8)]
    for i, name in enumerate(names):
        engine.add(make_request(name, length=5 + 23 * i, which=i, max_tokens=24))
    return [done.tokens for done in finish(engine, names)]


def test_chunks_and_batches_change_nothing_in_float32():
    whole = make_engine(dtype=torch.float32, max_num_batched_tokens=1024, max_num_seqs=1)
    truth = answers(whole)
    whole.close()
    mixed = make_engine(dtype=torch.float32, num_pages=12)
    assert answers(mixed) == truth
    assert mixed.stats().num_pages_in_use == 0
    mixed.close()


@pytest.mark.parametrize("settings", [{"scaling": "unit"}, {"granularity": "token"}], ids=str)
def test_pages_in_fp8_run(settings):
    engine = make_engine(octavo.Recipe(kv_cache=settings))
    found = answers(engine)
    assert all(len(tokens) == 24 for tokens in found)
    again = make_engine(octavo.Recipe(kv_cache=settings))
    assert answers(again) == found
    engine.close()
    again.close()


def test_the_cache_takes_its_part_of_the_memory():
    free, total = torch.cuda.mem_get_info()
    fraction = 1 - (free - SPARE) / total  # all that is in use, and what others may take meanwhile
    engine = make_engine(num_pages=None, memory_fraction=fraction, max_num_seqs=64)
    nbytes = engine._runner.storage.nbytes
    most = 64 * 16 * engine._runner.storage.spec.bytes_per_page  # of 64 requests of 1024 tokens
    num_scale_bytes = 4096  # at most, beside the pages
    assert 0 < nbytes <= min(SPARE, most + num_scale_bytes)
    answers(engine)
    engine.close()


@pytest.mark.gpu
def test_single_tokens_are_products_with_a_vector():
    engine = make_engine(max_num_seqs=1, cuda_graphs=False)
    model = engine.model
    linears = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    assert {type(part) for part in linears} == {OneTokenLinear}
    assert answers(engine)
    engine.close()
    assert {type(part) for part in linears} == {torch.nn.Linear}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_counters_of_saturation_are_read_without_waiting():
    engine = make_engine(octavo.Recipe(kv_cache={"scaling": "unit"}))
    answers(engine)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.read_saturation()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    engine.read_saturation()
    found = engine.stats().saturated
    assert found.keys is not None and found.values is not None
    engine.close()

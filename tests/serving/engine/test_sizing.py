"""How many pages the cache gets, and how long a context may be."""

import pytest

pytest.importorskip("transformers")
from octavo.errors import CapacityError, ConfigError
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.serving.engine import sizing
from octavo.serving.engine.settings import EngineSettings
from octavo.serving.engine.sizing import choose_context, choose_num_pages
from octavo_testkit.serving.tiny_engine import make_model


@pytest.fixture(scope="module")
def model():
    made = EngineModel(make_model())
    yield made
    made.close()


def num_pages(model, **changes):
    settings = EngineSettings(**{"page_size": 16, "max_num_seqs": 4, **changes})
    return choose_num_pages(model, model.cache_spec(16), settings)


def test_pages_that_are_asked_for_are_given(model):
    assert num_pages(model, num_pages=3) == 3


def test_no_more_than_all_requests_could_use(model):
    assert num_pages(model) == 4 * 1024 // 16
    assert num_pages(model, max_context=40) == 4 * 3


def test_no_more_than_memory_has_room_for(model, monkeypatch):
    page_bytes = model.cache_spec(16).bytes_per_page
    monkeypatch.setattr(sizing, "CPU_CACHE_BYTES", 10 * page_bytes + 100)
    assert num_pages(model) == 10
    monkeypatch.setattr(sizing, "CPU_CACHE_BYTES", page_bytes - 1)
    with pytest.raises(CapacityError, match=f"page of {page_bytes} bytes"):
        num_pages(model)


@pytest.mark.parametrize(
    ("asked", "num_tokens", "expected"),
    [(None, 2048, 1024), (None, 512, 512), (300, 512, 300), (512, 512, 512)],
)
def test_a_context_is_that_of_the_model_or_what_fits(model, asked, num_tokens, expected):
    assert choose_context(model, num_tokens, EngineSettings(max_context=asked)) == expected


def test_a_context_that_does_not_fit_is_refused(model):
    with pytest.raises(ConfigError, match="up to 1024, the model's own, got 1025"):
        choose_context(model, 4096, EngineSettings(max_context=1025))
    with pytest.raises(ConfigError, match="up to 64, which is what the cache holds"):
        choose_context(model, 64, EngineSettings(max_context=65))


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(64, 4), (5, 5), (7, 3)])
def test_a_trial_has_all_tokens_and_sequences(model, monkeypatch, num_tokens, num_seqs):
    seen = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda *args: seen.append((*args, forward(*args))) or seen[-1][-1]
    )
    sizing.try_pass(model, model.cache_spec(16), num_tokens=num_tokens, num_seqs=num_seqs)
    ((ids, _, rows, step, _, logits),) = seen
    assert (len(ids), len(rows), len(logits)) == (num_tokens, num_seqs, num_seqs)
    assert len(set(step.slots.tolist())) == num_tokens


@pytest.mark.parametrize("changes", [{"num_pages": 0}, {"memory_fraction": 0}])
def test_settings_that_cannot_work_are_refused(changes):
    with pytest.raises(ConfigError):
        EngineSettings(**changes)

"""Calls of generate(), timed as users make them: rows take turns; wrong attention ends the run."""

import pytest
import torch

pytest.importorskip("transformers")

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.decoder import make_decoder
from octavo.layers.decoder_attention import DecoderAttention
from octavo.layers.linear import Fp8Linear
from octavo.measure.bench.generate_calls import ROWS, CallCase, run_generate_calls

pytestmark = pytest.mark.filterwarnings("ignore:the model brings no scales")


@pytest.fixture(scope="module")
def model():
    return make_decoder("tiny", torch.device("cpu"), 1)


def run(model, recipes=ROWS, **case):
    given = {"prompt": 20, "new_tokens": 4} | case
    return run_generate_calls(
        model, CallCase(**given), recipes, about={"model": "tiny"}, command="octavo bench"
    )


def test_records_of_all_rows(model):
    records = {record.case["recipe"]: record for record in run(model, batch=2)}
    assert tuple(records) == ROWS
    assert {record.baseline for record in records.values()} == {"stock"}
    assert records["stock"].values["relative_rms"] == 0 and records["stock"].impl == "transformers"
    assert 0 < records["kv"].values["relative_rms"] < records["kv+linear"].values["relative_rms"]
    assert records["kv+linear"].case["batch"] == 2 and records["kv"].case["new_tokens"] == 4
    # The model that was given is the stock one still.
    assert not any(isinstance(part, Fp8Linear | DecoderAttention) for part in model.modules())


def test_a_time_is_that_of_one_more_token(model, monkeypatch):
    """Whatever the prompt costs, it is in both calls."""
    spent = {"now": 0.0}

    def generate(self, prompt, *, max_new_tokens, min_new_tokens, **options):
        assert max_new_tokens == min_new_tokens and not options["do_sample"]
        spent["now"] += 3.0 + 0.002 * max_new_tokens

    monkeypatch.setattr(type(model), "generate", generate)
    monkeypatch.setattr("time.perf_counter", lambda: spent["now"])
    [record] = run(model, ["stock"])
    assert record.values["median_ms"] == pytest.approx(2.0)


def test_wrong_attention_ends_the_run(model, monkeypatch):
    def prefill(self, q, *args, **options):
        return torch.zeros_like(q)

    monkeypatch.setattr(DecoderAttention, "prefill", prefill)
    with pytest.raises(UnsupportedError, match=r"generate\(\) with kv is wrong"):
        run(model, ["stock", "kv"])


def test_cases_that_say_nothing():
    with pytest.raises(ConfigError, match="more than 2 new tokens"):
        CallCase(20, new_tokens=2)
    with pytest.raises(ConfigError, match="a prompt and a batch of at least 1"):
        CallCase(0)

"""Short benchmarks run as they would on a GPU, and what they measure decides."""

import pytest
import torch

pytest.importorskip("transformers")

from octavo.errors import UnsupportedError
from octavo.measure.advise import measured
from octavo.measure.advise.measured import decoder_rows, measure, measured_output_len
from octavo.measure.advise.shape import ModelShape, Workload, find_model

CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_decoder_is_measured_under_the_name_that_advice_knows():
    model, workload = find_model("tiny-gpt-oss"), Workload(context=64, output_len=4)
    records, failures = measure(model, workload, CPU, name="tiny-gpt-oss", command="x")
    rows = {str(record.case["row"]) for record in records}
    assert {"auto", "fp8", "fp8+skip=sliding_window"} <= rows
    assert {record.case["model"] for record in records} == {"tiny-gpt-oss"}
    assert all(record.values["median_itl_ms"] > 0 for record in records)
    # Who is not measured is named.
    assert rows | {name for name, _ in failures} == set(decoder_rows(model))


def test_the_first_sequence_decodes_while_the_last_prompt_is_computed():
    """7 more prompts of 20,000 tokens take 18 steps of 8,192 tokens, 8 of them of sequences."""
    assert measured_output_len(Workload(context=20000, concurrency=8)) == 18 + 16 + 1
    assert measured_output_len(Workload(context=20000, concurrency=8, output_len=2)) == 18 + 2 + 1
    assert measured_output_len(Workload(context=64, concurrency=1)) == 0 + 16 + 1


def test_sequences_that_leave_prompts_no_room():
    assert measured_output_len(Workload(context=64, concurrency=4096)) == 64 + 16 + 1
    with pytest.raises(UnsupportedError, match="up to 4096 sequences at once to measure, got 4097"):
        measured_output_len(Workload(context=64, concurrency=4097))


@pytest.mark.slow
def test_all_sequences_decode_at_once_after_many_prompts(monkeypatch):
    """Prompts that take more steps than tokens are timed."""
    monkeypatch.setattr(measured, "MAX_BATCHED_TOKENS", 16)
    monkeypatch.setattr(measured, "decoder_rows", lambda model: ["auto"])
    workload = Workload(context=24, output_len=2, concurrency=4)
    model = find_model("tiny")
    (record,), failures = measure(model, workload, CPU, name="tiny", command="x")
    assert record.values["num_itl_samples"] >= 4 and not failures


@pytest.mark.slow
def test_a_tower_and_a_step_are_measured():
    pytest.importorskip("diffusers")
    tower = ModelShape("tiny", tower=find_model("qwen3-vl-8b").tower)
    load = Workload(image_size=(720, 1280))
    records, _ = measure(tower, load, CPU, name="tiny", command="x")
    assert {"bf16", "dynamic", "static"} <= {str(r.case["recipe"]) for r in records}
    step = find_model("tiny-flux")
    records, _ = measure(step, Workload(), CPU, name="tiny-flux", command="x")
    assert {str(r.case["recipe"]) for r in records} == {"bf16", "linear", "linear+attention"}


def test_what_has_no_weights_cannot_be_measured():
    model = ModelShape("qwen3-vl-8b", decoder=find_model("tiny").decoder)
    with pytest.raises(UnsupportedError, match="give the model's folder"):
        measure(model, Workload(), CPU, name="qwen3-vl-8b", command="x")

"""What records of other models add to a prediction: the same models for every plan."""

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from octavo.integrations.traced_work import LinearWork
from octavo.integrations.transformers.cache_layers import CacheLayer
from octavo.integrations.transformers.model_work import DecoderWork
from octavo.measure.advise.cost import DecoderPlan, decode_cost, prefill_cost
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.predict import Predictor
from octavo.measure.advise.shape import ModelShape
from octavo.measure.advise.speeds import Speeds
from octavo.measure.records import Machine, Measurement

H200 = find_gpu("h200")
MACHINE = Machine.current(gpu=H200.name, capability=(9, 0))
LENGTH, OUTPUT_LEN = 65536, 128
PLAIN, PEER = DecoderPlan(), DecoderPlan(prefill_impl="vllm-fa3")
FP8, SKIP = DecoderPlan(is_kv_fp8=True), DecoderPlan(is_kv_fp8=True, skips_windows=True)


def shape(name, window=None):
    """Two layers, the second with a window if it is given."""
    layers = (CacheLayer("0", 0, 8, 128), CacheLayer("1", 1, 8, 128, window))
    work = DecoderWork(
        layers=layers,
        num_heads=32,
        linear=(LinearWork("o_proj", 4096, 4096),),
        head=LinearWork("lm_head", 4096, 4096, is_reached=False),
        weight_bytes=2**26,
        max_length=131072,
    )
    return ModelShape(name, work)


def record(model, plan, ratio, length=LENGTH):
    """A model that takes `ratio` times the sum of its parts."""
    work, speeds = model.decoder, Speeds([], H200)
    middle = length + OUTPUT_LEN // 2
    itl = decode_cost(work, speeds, plan, context=middle, batch=1).total_ms
    ttft = prefill_cost(work, speeds, plan, num_tokens=length).total_ms
    case = {"model": model.name, "layers": 2, "input_len": length, "output_len": OUTPUT_LEN}
    case |= {"batch_size": 1, "kv_cache_dtype": "fp8_e4m3" if plan.is_kv_fp8 else "auto"}
    case["row"] = f"{plan}{plan.prefill_impl or ''}"
    if plan.skips_windows:
        case["skip_layers"] = "sliding_window"
    if plan.prefill_impl is not None:
        case["prefill_impl"] = plan.prefill_impl
    values = {"median_itl_ms": ratio * itl, "median_ttft_ms": ratio * ttft}
    return Measurement(
        op="latency", impl="octavo", case=case, values=values, machine=MACHINE, command="planted"
    )


def predictor(rows, *shapes):
    return Predictor(rows, H200, shapes=shapes)


def test_a_model_without_windows_counts_for_plans_that_skip_them():
    """Left out there, and counted in BF16, it would make skipping seem slow or fast."""
    full, windows, asked = shape("full"), shape("windows", 128), shape("asked", 128)
    rows = [record(full, plan, 1.0) for plan in (PLAIN, FP8)]
    rows += [record(windows, plan, 1.44) for plan in (PLAIN, FP8, SKIP)]
    found = predictor(rows, full, windows)
    for plan in (PLAIN, FP8, SKIP):
        token = found.decode(asked, plan, context=LENGTH, batch=1)
        assert token.based_on == ("full", "windows")
        assert token.factor == pytest.approx(1.2)
        assert found.prefill(asked, plan, LENGTH).factor == pytest.approx(1.2)


def test_a_prompts_record_is_that_of_the_same_attention():
    other, asked = shape("other"), shape("asked")
    rows = [record(other, PLAIN, 1.5), record(other, PEER, 1.1)]
    for ordered in (rows, rows[::-1]):
        found = predictor(ordered, other)
        factors = [found.prefill(asked, plan, LENGTH).factor for plan in (PLAIN, PEER)]
        assert factors == pytest.approx([1.5, 1.1])
    # One of another attention is better than none.
    assert predictor(rows[:1], other).prefill(asked, PEER, LENGTH).factor == pytest.approx(1.5)


def test_far_records_say_nothing():
    other, asked = shape("other"), shape("asked")
    rows = [record(other, PLAIN, 1.5)]
    token = predictor(rows, other).decode(asked, PLAIN, context=LENGTH, batch=64)
    assert token.factor == 1.0 and token.based_on == ()


def test_a_models_own_records_count_first():
    other, asked = shape("other"), shape("asked")
    rows = [record(other, FP8, 1.5), record(asked, FP8, 1.2)]
    found = predictor(rows, other, asked)
    assert found.decode(asked, FP8, context=LENGTH, batch=1).factor == pytest.approx(1.2)
    left_out = Predictor(rows, H200, shapes=(other, asked), leave_out=["asked"])
    assert left_out.decode(asked, FP8, context=LENGTH, batch=1).factor == pytest.approx(1.5)
    assert left_out.decode(
        asked, replace(FP8, is_linear_fp8=True), context=LENGTH, batch=1
    ).factor == pytest.approx(1.5)

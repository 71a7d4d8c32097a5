"""What a model costs: products that the engine makes one, and the passes over a prompt."""

import pytest

pytest.importorskip("transformers")

from octavo.integrations.traced_work import LinearWork
from octavo.integrations.transformers.cache_layers import CacheLayer
from octavo.integrations.transformers.model_work import DecoderWork
from octavo.measure.advise.cost import CHUNK, DecoderPlan, _joined, _num_pairs, prefill_cost
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.speeds import STATED, Speeds


def work(name, outputs, is_reached=True):
    return LinearWork(name, 64, outputs, is_reached=is_reached)


def test_layers_with_one_input_are_one_product():
    layers = (
        work("layers.0.attn.q_proj", 32),
        work("layers.0.attn.k_proj", 16),
        work("layers.0.attn.v_proj", 16),
        work("layers.0.attn.o_proj", 64),
        work("layers.0.mlp.gate_proj", 128),
        work("layers.0.mlp.up_proj", 128),
        work("layers.1.attn.q_proj", 32),
        work("layers.1.attn.k_proj", 16, is_reached=False),
    )
    found = {one.name: one.outputs for one in _joined(layers)}
    assert found == {
        "layers.0.attn.q_proj": 64,
        "layers.0.attn.o_proj": 64,
        "layers.0.mlp.gate_proj": 256,
        "layers.1.attn.q_proj": 32,
        "layers.1.attn.k_proj": 16,
    }


def decoder(*windows):
    """A layer of 4 heads over 2, of 64, for each window."""
    return DecoderWork(
        layers=tuple(CacheLayer(f"{i}", i, 2, 64, one) for i, one in enumerate(windows)),
        num_heads=4,
        linear=(work("o_proj", 64),),
        head=work("lm_head", 64),
        weight_bytes=2**20,
        max_length=None,
    )


def gathered_ms(model, plan, num_tokens):
    found = prefill_cost(model, Speeds([], find_gpu("h200")), plan, num_tokens=num_tokens)
    return found.parts["pages gathered"]


def copied_ms(num_bytes, launches):
    fixed_us, share = STATED["copy"]
    return launches * fixed_us / 1e3 + 1e3 * num_bytes / (share * 4540e9)


def test_each_pass_gathers_the_pages_of_all_before():
    token = 2 * 2 * 64  # values of keys and of values, read and written below
    tokens = CHUNK + 2 * CHUNK + (2 * CHUNK + 100)
    own, peer = DecoderPlan(), DecoderPlan(prefill_impl="vllm-fa3")
    fp8, skip = DecoderPlan(is_kv_fp8=True), DecoderPlan(is_kv_fp8=True, skips_windows=True)
    length, model = 2 * CHUNK + 100, decoder(None, 128)
    one = copied_ms(2 * 2 * token * tokens, 3)
    assert gathered_ms(model, own, length) == pytest.approx(2 * one)
    half = copied_ms(2 * token * tokens, 3)
    assert gathered_ms(model, fp8, length) == pytest.approx(2 * half)
    assert gathered_ms(model, skip, length) == pytest.approx(one + half)
    # Indexed, laid out and cleared, keys and values by themselves.
    thrice = copied_ms(3 * 2 * 2 * token * tokens, 3 * 6)
    assert gathered_ms(model, peer, length) == pytest.approx(2 * thrice)
    nobody = DecoderPlan(prefill_impl="fastest")  # of no records
    assert gathered_ms(model, nobody, length) == pytest.approx(2 * one)


def test_passes_meet_the_pairs_of_the_whole():
    assert _num_pairs(0, 1000, None) == 1000**2 / 2
    assert _num_pairs(0, 300, None) + _num_pairs(300, 1000, None) == 1000**2 / 2
    assert _num_pairs(500, 1000, 128) == 500 * 128
    assert _num_pairs(0, 1000, 128) == 128**2 / 2 + 872 * 128
    assert _num_pairs(0, 100, 128) == 100**2 / 2

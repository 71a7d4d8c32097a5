"""Attention over pages: which shapes are measured, and what counts as right."""

import pytest
import torch

from octavo.measure.bench import peers
from octavo.measure.bench.benchmark import run_benchmark
from octavo.measure.bench.kernels import SUITES, benchmarks
from octavo.numerics.error import relative_rms
from octavo.reference.paged import paged_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPS = ["decode_attention", "prefill_attention"]


def test_chunks_of_prompts_after_what_is_cached():
    shapes = [str(one.case["shape"]) for one in benchmarks(CUDA, ["prefill_attention"])]
    assert len(set(shapes)) == len(shapes) == 16
    assert {
        f"{new} after {old} heads 32/8 head_dim 128 page 64"
        for new in (512, 2048, 8192)
        for old in (0, 8192, 32768, 131072)
    } < set(shapes)
    assert len(benchmarks(CUDA, ["prefill_attention"], shapes=["512 after 0", "head_dim 64"])) == 3


def test_decoding_with_few_kv_heads():
    shapes = {str(one.case["shape"]) for one in benchmarks(CUDA, ["decode_attention"])}
    assert {
        "16x8192 heads 16/1 head_dim 128 page 64",
        "2x32768 heads 16/2 head_dim 256 page 64",
        *(f"1x{n} heads 32/4 head_dim 128 page 64" for n in (4096, 16384, 65536, 262144)),
    } < shapes


@pytest.mark.parametrize("op", OPS)
def test_the_peers_on_a_gpu(op):
    for benchmark in benchmarks(CUDA, [op]):
        found = [(one.operands, dict(one.notes)) for one in benchmark.participants if one.is_peer]
        gathered = [("BF16", {"pages": "gathered"})] if op == "prefill_attention" else []
        assert found == [("FP8", {}), ("BF16", {}), *gathered]
        assert {one.name for one in benchmark.participants if one.is_peer} == {"vllm-fa3"}


def test_the_work_of_a_chunk():
    (benchmark,) = benchmarks(CUDA, ["prefill_attention"], shapes=["512 after 8192"])
    assert benchmark.flops == 4 * 32 * 128 * (512 * 8192 + 512 * 513 / 2)
    kv, rows = 2 * (8192 + 512) * 8 * 128, 512 * 32 * 128
    num_bytes = {one.operands: one.bytes for one in benchmark.participants}
    assert num_bytes == {"FP8": kv + 3 * rows, "BF16": 2 * kv + 4 * rows}


@pytest.mark.parametrize("op", OPS)
def test_the_error_is_that_of_the_last_queries(op):
    (benchmark,) = benchmarks(CPU, [op])
    inputs = benchmark.make_inputs(0)
    q, ends, q_len = inputs.packed()
    assert q_len == {"decode_attention": 1, "prefill_attention": 80}[op]
    whole, _ = paged_attention(q, inputs.view, ends, compute=torch.float64)
    truth = benchmark.truth(inputs)
    assert truth.shape[1] == min(64, q_len)
    assert relative_rms(benchmark.checked(inputs, whole), truth) < 1e-12
    wrong = whole.clone()
    wrong[-1] = 0
    assert relative_rms(benchmark.checked(inputs, wrong), truth) > 0.05
    records, _ = run_benchmark(benchmark, CPU, "pytest")
    errors = {record.case["operands"]: record.values["relative_rms"] for record in records}
    assert 0.01 < errors["FP8"] < 0.07 and 1e-4 < errors["BF16"] < 0.01


@pytest.mark.parametrize("op", OPS)
def test_the_peer_is_given_all_new_tokens(op, monkeypatch):
    """A stand-in for vLLM's library, with its entry's 37 places."""
    (benchmark,) = benchmarks(CPU, [op])
    inputs = benchmark.make_inputs(0)
    q, ends, q_len = inputs.packed()

    class Library:
        def get_scheduler_metadata(self, *asked):
            assert asked[:2] == (len(inputs.q), q_len) and torch.equal(asked[9], ends)

        def fwd(self, *asked):
            assert torch.equal(asked[0], q) and torch.equal(asked[7], ends) and asked[12] == q_len
            asked[6].copy_(paged_attention(q, inputs.view, ends, compute=torch.float64)[0])

    monkeypatch.setattr(peers, "load", lambda namespace, folder: Library())
    actual = peers.vllm_paged(None, inputs.q, inputs.view)()
    assert actual.shape == inputs.q.shape
    assert relative_rms(benchmark.checked(inputs, actual), benchmark.truth(inputs)) < 0.01


def test_pages_that_were_gathered_for_the_peer(monkeypatch):
    size = SUITES["prefill_attention"].small[0]
    gathered = SUITES["prefill_attention"].make(size, CUDA, None).participants[-1]
    inputs = benchmarks(CPU, ["prefill_attention"])[0].make_inputs(0)
    seen = []
    monkeypatch.setattr(peers, "load", lambda namespace, folder: None)
    monkeypatch.setattr(peers, "vllm_fwd", lambda _, q, k, v, out, **given: seen.append((k, given)))
    assert gathered.prepare(inputs)().shape == inputs.packed()[0].shape
    ((key, given),) = seen
    assert given["max_seqlen_q"] == size.q_len and given["is_causal"]
    assert len(key) == 192 and not key[140:].any() and key[:140].all(-1).any(-1).all()

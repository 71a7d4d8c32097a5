"""Decoding in a CUDA graph: a graph repeats calls on the same tensors, whatever the host says.

Without a GPU, `Graph` stands for one. Kernels in real graphs are tested in tests/kernels.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo import ops
from octavo_testkit.vllm_engine.layer import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    Case,
    Sequences,
    engine_of,
    make_layer,
    truth,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROWS = 4  # of the graph; steps have fewer requests
CASES = [
    Case("bf16"),
    Case("fp8 all", fp8=True, window=20, softcap=4.0, sinks=True, per_head=True),
]


class Graph(TorchDispatchMode):
    """Notes the calls that torch dispatches, to repeat them on the same tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


class Buffers:
    """The tensors that vLLM's runner keeps: what a step writes to them is all that a graph sees."""

    def __init__(self, q_len):
        self.q_len, num_tokens = q_len, ROWS * q_len
        self.q = torch.zeros(num_tokens, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
        self.k, self.v = (self.q[:, :KV_HEADS].clone() for _ in range(2))
        self.output = torch.full_like(self.q, torch.nan)
        self.lengths = torch.zeros(ROWS + 5, dtype=torch.int32)
        self.table = torch.zeros(ROWS + 5, 3, dtype=torch.int32)
        self.slots = torch.full((num_tokens,), -1)

    def common(self):
        """What a builder is told when vLLM captures."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        self.lengths[:ROWS] = self.q_len
        starts = torch.arange(ROWS + 1, dtype=torch.int32) * self.q_len
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=self.lengths[:ROWS],
            num_reqs=ROWS,
            num_actual_tokens=len(self.q),
            max_query_len=self.q_len,
            max_seq_len=2048,
            block_table_tensor=self.table[:ROWS],
            slot_mapping=self.slots,
        )

    def write(self, qkv, common):
        """A step of fewer requests: the others have no tokens, and page 0."""
        self.lengths.zero_()
        self.table.zero_()
        self.slots.fill_(-1)
        for buffer, values in (
            *zip((self.q, self.k, self.v), qkv, strict=True),
            (self.lengths, common.seq_lens),
            (self.table, common.block_table_tensor),
            (self.slots, common.slot_mapping),
        ):
            buffer[: len(values)] = values


def run(layer, batch, buffers):
    impl, pages = layer.impl, layer.kv_cache
    impl.do_kv_cache_update(layer, buffers.k, buffers.v, pages, buffers.slots)
    impl.forward(layer, buffers.q, buffers.k, buffers.v, pages, batch, buffers.output)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_graph_follows_every_step(models, case, q_len):
    with engine_of(models, kv_cache_dtype="fp8" if case.fp8 else "auto") as config:
        layer, sinks = make_layer(config, case)
        builder = layer.get_attn_backend().get_builder_cls()(
            None, [layer.layer_name], config, torch.device("cpu")
        )
    assert builder.get_cudagraph_support(config, None).name == "UNIFORM_BATCH"
    buffers, graph = Buffers(q_len), Graph()
    batch = builder.build_for_cudagraph_capture(buffers.common())
    assert batch.prompts is None and not batch.plans
    for kept, given in (
        (batch.decodes.lengths, buffers.lengths),
        (batch.decodes.page_table, buffers.table),
    ):
        assert kept.data_ptr() == given.data_ptr()
    with torch.inference_mode(), graph:
        run(layer, batch, buffers)
    names = [str(function) for function, *_ in graph.calls]
    assert "octavo.plan_decode.default" in names  # as a part of the graph
    assert not any("_local_scalar_dense" in name for name in names)  # nothing waits for a GPU

    sequences = Sequences([80, 70, 65])
    *_, (q, k, v), common = sequences.step([0, 1, 2], [60, 33, 9])
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, common.slot_mapping)
    (plan,) = batch.plans.values()
    for rows in ([0, 1, 2], [2, 0], [1], [1, 2, 0]):
        spans, qkv, common = sequences.step(rows, [q_len] * len(rows))
        buffers.write(qkv, common)
        with torch.inference_mode():
            graph.replay()
        used = len(rows) * q_len
        expected = truth(sequences, spans, case, sinks)
        error = (buffers.output[:used].double() - expected).pow(2).mean().sqrt()
        assert error / expected.pow(2).mean().sqrt() < (0.06 if case.fp8 else 0.006), rows
        assert not buffers.output[used:].any()  # padding
        assert not layer.kv_cache[0].any()
        pages = layer.impl._view.for_batch(batch.decodes.page_table, batch.decodes.lengths)
        fresh = ops.plan_decode(pages, layer.impl.spec, num_heads=HEADS, q_len=q_len)
        assert torch.equal(plan.items, fresh.items)
        assert int(plan.items[:, 5].max()) == int(common.seq_lens.max())


@pytest.mark.parametrize(("drafted", "support"), [(3, "BATCH"), (4, "SINGLE_TOKEN_DECODE")])
def test_graphs_of_speculation_go_as_far_as_one_call_decodes(models, drafted, support):
    from octavo.integrations.vllm.backend import BatchBuilder

    speculation = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    speculation["num_speculative_tokens"] = drafted
    with engine_of(models, speculative_config=speculation) as config:
        found = BatchBuilder.get_cudagraph_support(config, None)
    assert found.name == f"UNIFORM_{support}"

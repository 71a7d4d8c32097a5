"""One attention layer inside vLLM with octavo's implementation, steps for it, and the truth."""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from octavo_testkit.vllm_engine.engines import BACKEND

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE = 4, 2, 64, 32
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """What a layer has, and the strides of its pages: "HND", or "NHD" with tokens before heads."""

    name: str
    fp8: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    per_head: bool = False
    layout: str = "HND"

    def __str__(self) -> str:
        return self.name


@contextmanager
def engine_of(models, **arguments):
    """The config of an engine that asks for OCTAVO, as the current one."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    shared = {"model": str(models / "llama"), "dtype": "bfloat16", "block_size": PAGE_SIZE}
    arguments = {"attention_backend": BACKEND, "enforce_eager": True, **shared, **arguments}
    config = EngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(config):
        yield config


def make_layer(config, case):
    """A layer with pages, its sinks, and its scales for each KV head."""
    from vllm.model_executor.layers.attention import Attention

    sinks = torch.randn(HEADS) if case.sinks else None
    layer = Attention(
        HEADS,
        HEAD_SIZE,
        HEAD_SIZE**-0.5,
        KV_HEADS,
        cache_config=config.cache_config,
        logits_soft_cap=case.softcap,
        per_layer_sliding_window=case.window,
        prefix="model.layers.0.self_attn.attn",
        sinks=sinks,
    )
    shape = (40, KV_HEADS, PAGE_SIZE, 2 * HEAD_SIZE)
    dtype = torch.uint8 if case.fp8 else torch.bfloat16
    pages = torch.zeros(shape, dtype=dtype)
    if case.layout == "NHD":
        pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
    layer.kv_cache = pages
    if case.fp8:
        layer._k_scale = torch.tensor([0.01, 0.02] if case.per_head else 0.02)
        layer._v_scale = torch.tensor([0.02, 0.01] if case.per_head else 0.01)
    return layer, sinks


class Sequences:
    """What vLLM's scheduler and runner would know of three requests."""

    def __init__(self, lengths):
        pages = -(-max(lengths) // PAGE_SIZE)
        order = torch.randperm(39)[: len(lengths) * pages] + 1  # page 0 is vLLM's own
        self.table = order.view(len(lengths), pages).to(torch.int32)
        self.done = [0] * len(lengths)
        self.q, self.k, self.v = (
            [torch.randn(n, heads, HEAD_SIZE).bfloat16() for n in lengths]
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )

    def step(self, rows, counts):
        """The next tokens of some requests, and what vLLM tells a builder of them."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        spans = [(r, self.done[r], self.done[r] + n) for r, n in zip(rows, counts, strict=True)]
        for row, _, end in spans:
            self.done[row] = end
        q, k, v = (torch.cat([x[r][a:b] for r, a, b in spans]) for x in (self.q, self.k, self.v))
        slots = [
            int(self.table[r, t // PAGE_SIZE]) * PAGE_SIZE + t % PAGE_SIZE
            for r, a, b in spans
            for t in range(a, b)
        ]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([end for *_, end in spans], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(rows),
            num_actual_tokens=len(slots),
            max_query_len=max(counts),
            max_seq_len=int(lengths.max()),
            block_table_tensor=self.table[rows],
            slot_mapping=torch.tensor(slots),
        )
        return spans, (q, k, v), common


def truth(sequences, spans, case, sinks):
    """Attention of the newest tokens in float64, nothing rounded."""
    outputs = []
    for row, begin, end in spans:
        q, k, v = (
            x[row][:end].double().transpose(0, 1) for x in (sequences.q, sequences.k, sequences.v)
        )
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores = q[:, begin:] @ k.transpose(1, 2) / math.sqrt(HEAD_SIZE)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        distance = torch.arange(begin, end)[:, None] - torch.arange(end)
        hidden = distance < 0
        if case.window:
            hidden |= distance >= case.window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            column = sinks.double().view(-1, 1, 1).expand(-1, end - begin, 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., :end]
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs)

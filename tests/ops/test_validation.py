"""Every wrong call is refused before anything runs, and told what was expected and what came."""

import math
from dataclasses import replace

import pytest
import torch

from octavo import ops
from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerBlock, PerChannel, PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import Quantized, quantize
from octavo.testing.cases import MatmulCase, PagedCase
from octavo.testing.inputs import make_matmul_inputs, make_packing, make_paged_view

FP8 = E4M3.dtype
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def zeros(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def scales(q: tuple = (), k: tuple = (), v: tuple = (), dtype: torch.dtype = F32) -> QkvScales:
    return QkvScales(*(torch.ones(shape, dtype=dtype) for shape in (q, k, v)))


def view(dtype: torch.dtype = FP8) -> PagedView:
    return make_paged_view(PagedCase(lengths=(3, 65), q_lens=(1, 1), dtype=dtype))


def attention(**changes):
    """A good call but for `changes`: 2 sequences, 5 queries, 7 keys, 4 and 2 heads of 64."""
    call = {"q": zeros(2, 5, 4, 64), "k": zeros(2, 7, 2, 64), "v": zeros(2, 7, 2, 64)}
    return ops.attention(**(call | changes))


def fp8_attention(**changes):
    call = {"q": zeros(2, 5, 4, 64), "k": zeros(2, 7, 2, 64), "v": zeros(2, 7, 2, 64)}
    call = {name: x.to(FP8) for name, x in call.items()} | {"scales": scales()}
    return ops.attention(**(call | changes))


def packed(**changes):
    call = {"q": zeros(5, 4, 64), "k": zeros(7, 2, 64), "v": zeros(7, 2, 64)}
    return ops.attention(**(call | {"packing": make_packing((2, 3), (3, 4))} | changes))


def append(**changes):
    call = {"view": view(), "key": zeros(3, 2, 64), "value": zeros(3, 2, 64)}
    return ops.append_kv(**(call | {"slots": ints(1, 2, -1, dtype=torch.int64)} | changes))


def prefill(**changes):
    call = {"q": zeros(4, 4, 64), "view": view(), "cu_seqlens_q": ints(0, 1, 4), "max_seqlen_q": 3}
    return ops.prefill_attention(**(call | changes))


def fp8_prefill(**changes):
    return prefill(**({"q": zeros(4, 4, 64, dtype=FP8), "q_scale": torch.ones(())} | changes))


def decode(**changes):
    return ops.decode_attention(**({"q": zeros(2, 1, 4, 64), "view": view()} | changes))


def quantize_op(**changes):
    return ops.quantize(**({"x": zeros(6, 32)} | changes))


def qkv(**changes):
    call = {"q": zeros(5, 4, 64), "k": zeros(5, 2, 64), "v": zeros(5, 2, 64)}
    return ops.quantize_qkv(**(call | changes))


def matmul(**changes):
    return ops.scaled_mm(**(make_matmul_inputs(MatmulCase(rows=4, columns=6, depth=32)) | changes))


def of(x: torch.Tensor, granularity) -> Quantized:
    return quantize(x, granularity)


GOOD = [attention, fp8_attention, packed, append, prefill, fp8_prefill, decode]
GOOD += [quantize_op, qkv, matmul]


@pytest.mark.parametrize("call", GOOD, ids=lambda call: call.__name__)
def test_the_call_that_the_table_changes_is_good(call):
    call()


# call, what is changed, what the message says
BAD = [
    # attention: shapes
    (
        attention,
        {"q": zeros(5, 4, 64)},
        "q of shape [batch, length, heads, head_dim], got [5, 4, 64]",
    ),
    (
        attention,
        {"k": zeros(7, 2, 64)},
        "k of shape [batch, length, heads, head_dim], got [7, 2, 64]",
    ),
    (attention, {"v": zeros(1)}, "v of shape [batch, length, heads, head_dim], got [1]"),
    (
        attention,
        {"v": zeros(2, 8, 2, 64)},
        "k and v of one shape, got [2, 7, 2, 64] and [2, 8, 2, 64]",
    ),
    (attention, {"v": zeros(2, 7, 2, 32)}, "k and v of one shape"),
    (attention, {"spec": AttentionSpec(exponentials="codes")}, "takes FP8 queries, got torch.bfl"),
    (prefill, {"spec": AttentionSpec(exponentials="exact")}, "takes FP8 queries, got torch.bfl"),
    (attention, {"q": zeros(2, 5, 4, 72)}, "q and k of one head_dim above 0, got 72 and 64"),
    (
        attention,
        {"q": zeros(2, 5, 4, 0), "k": zeros(2, 7, 2, 0), "v": zeros(2, 7, 2, 0)},
        "head_dim above 0, got 0 and 0",
    ),
    (attention, {"q": zeros(3, 5, 4, 64)}, "q and k of one batch, got 3 and 2"),
    (attention, {"q": zeros(2, 5, 3, 64)}, "a multiple of the KV heads, got 3 and 2"),
    (
        attention,
        {"k": zeros(2, 7, 0, 64), "v": zeros(2, 7, 0, 64)},
        "a multiple of the KV heads, got 4 and 0",
    ),
    # attention: dtypes and scales
    (
        attention,
        {"q": zeros(2, 5, 4, 64, dtype=F32)},
        "all in FP8 or all in one dtype, got torch.float32, torch.bfloat16 and",
    ),
    (attention, {"k": zeros(2, 7, 2, 64, dtype=FP8)}, "all in FP8 or all in one dtype"),
    (
        attention,
        {n: zeros(2, 7, 4, 64, dtype=F64) for n in "qkv"},
        "q in bfloat16, float16 or float32, got torch.float64",
    ),
    (
        attention,
        {n: zeros(2, 7, 4, 64, dtype=torch.int8) for n in "qkv"},
        "q in bfloat16, float16 or float32, got torch.int8",
    ),
    (
        attention,
        {n: zeros(2, 7, 4, 64, dtype=torch.float8_e4m3fnuz) for n in "qkv"},
        "got torch.float8_e4m3fnuz",
    ),
    (
        attention,
        {"scales": scales()},
        "q, k and v are torch.bfloat16, which has no scales: leave scales out",
    ),
    (fp8_attention, {"scales": None}, "q, k and v are FP8: pass the scales"),
    (
        fp8_attention,
        {"scales": scales(q=(2,))},
        "float32 q scale of shape [] or [4], got torch.float32 [2]",
    ),
    (
        fp8_attention,
        {"scales": scales(k=(4,))},
        "float32 k scale of shape [] or [2] or [2, 7, 2], got torch.float32 [4]",
    ),
    (
        fp8_attention,
        {"scales": scales(v=(2, 7))},
        "float32 v scale of shape [] or [2] or [2, 7, 2], got torch.float32 [2, 7]",
    ),
    (
        fp8_attention,
        {"scales": scales(q=(2, 5, 4))},
        "float32 q scale of shape [] or [4], got torch.float32 [2, 5, 4]",
    ),
    (
        fp8_attention,
        {"scales": scales(q=(1,))},
        "float32 q scale of shape [] or [4], got torch.float32 [1]",
    ),
    (
        fp8_attention,
        {"scales": scales(dtype=BF16)},
        "float32 q scale of shape [] or [4], got torch.bfloat16 []",
    ),
    (
        fp8_attention,
        {"scales": QkvScales.ones("meta")},
        "the scale of q on cpu like q, got it on meta",
    ),
    # attention: the rest
    (attention, {"sinks": zeros(2)}, "sinks of shape [4], got [2]"),
    (attention, {"sinks": zeros(4, 1)}, "sinks of shape [4], got [4, 1]"),
    (
        attention,
        {"sinks": ints(1, 2, 3, 4)},
        "sinks in bfloat16, float16 or float32, got torch.int32",
    ),
    (
        attention,
        {"key_mask": zeros(2, 7)},
        "bool key_mask of shape [2, 7], got torch.bfloat16 [2, 7]",
    ),
    (
        attention,
        {"key_mask": zeros(2, 5, dtype=torch.bool)},
        "bool key_mask of shape [2, 7], got torch.bool [2, 5]",
    ),
    (
        attention,
        {"key_mask": zeros(7, dtype=torch.bool)},
        "bool key_mask of shape [2, 7], got torch.bool [7]",
    ),
    (attention, {"out_dtype": F64}, "out_dtype bfloat16, float16 or float32, got torch.float64"),
    (
        attention,
        {"out_dtype": FP8},
        "out_dtype bfloat16, float16 or float32, got torch.float8_e4m3fn",
    ),
    (attention, {"k": zeros(2, 7, 2, 64, device="meta")}, "k on cpu like q, got it on meta"),
    (attention, {"sinks": zeros(4, device="meta")}, "sinks on cpu like q, got it on meta"),
    (
        attention,
        {"key_mask": zeros(2, 7, dtype=torch.bool, device="meta")},
        "key_mask on cpu like q",
    ),
    (
        attention,
        {"value_layout": "columns"},
        "expected value_layout rows or transposed, got 'columns'",
    ),
    (
        attention,
        {"value_layout": "transposed"},
        "quantize_qkv makes them",
    ),
    (attention, {"impl": "fa4"}, "impl for attention, one of gluon, triton, reference; got 'fa4'"),
    # packed attention
    (packed, {"q": zeros(1, 5, 4, 64)}, "q of shape [tokens, heads, head_dim], got [1, 5, 4, 64]"),
    (packed, {"key_mask": zeros(2, 7, dtype=torch.bool)}, "key_mask is for dense batches"),
    (
        packed,
        {"packing": Packing.same(ints(0, 5, dtype=torch.int64), 5)},
        "cu_seqlens_q as int32 [num_sequences + 1], got torch.int64 [2]",
    ),
    (
        packed,
        {"packing": Packing(ints(0, 5), zeros(2), 5, 7)},
        "cu_seqlens_k as int32 [num_sequences + 1], got torch.bfloat16 [2]",
    ),
    (
        packed,
        {"packing": Packing.same(torch.tensor(5, dtype=torch.int32), 5)},
        "cu_seqlens_q as int32 [num_sequences + 1], got torch.int32 []",
    ),
    (
        packed,
        {"packing": Packing.same(ints(), 5)},
        "cu_seqlens_q as int32 [num_sequences + 1], got torch.int32 [0]",
    ),
    (
        packed,
        {"packing": Packing(ints(0, 5), ints(0, 3, 7), 5, 7)},
        "cu_seqlens_q and _k of one length, got 2 and 3",
    ),
    (
        packed,
        {"packing": Packing.same(ints(0, 5).to("meta"), 5)},
        "cu_seqlens_q on cpu like q, got it on meta",
    ),
    (
        packed,
        {"packing": make_packing((2, 4), (3, 4))},
        "cu_seqlens_q to rise from 0 to at most 5, got [0, 2, 6]",
    ),
    # append_kv
    (
        append,
        {"key": zeros(2, 2, 64)},
        "key of shape [3, 2, 64] [tokens, num_kv_heads, head_dim], got [2, 2, 64]",
    ),
    (append, {"value": zeros(3, 4, 64)}, "value of shape [3, 2, 64]"),
    (
        append,
        {"value": zeros(3, 2, 72)},
        "value of shape [3, 2, 64] [tokens, num_kv_heads, head_dim], got [3, 2, 72]",
    ),
    (append, {"key": zeros(1, 3, 2, 64)}, "key of shape [3, 2, 64]"),
    (
        append,
        {"key": zeros(3, 2, 64, dtype=FP8)},
        "key in bfloat16, float16 or float32, got torch.float8_e4m3fn",
    ),
    (
        append,
        {"value": zeros(3, 2, 64, dtype=F64)},
        "value in bfloat16, float16 or float32, got torch.float64",
    ),
    (append, {"slots": ints(1, 2, 3)}, "int64 slots [num_tokens], got torch.int32 [3]"),
    (
        append,
        {"slots": ints(1, 2, 3, dtype=torch.int64)[None]},
        "int64 slots [num_tokens], got torch.int64 [1, 3]",
    ),
    (append, {"slots": torch.tensor(1)}, "int64 slots [num_tokens], got torch.int64 []"),
    (
        append,
        {"slots": ints(1, 2, 3, dtype=torch.int64).to("meta")},
        "slots on cpu like pages, got it on meta",
    ),
    (append, {"impl": "cuda"}, "impl for append_kv, one of triton, reference; got 'cuda'"),
    # prefill_attention
    (prefill, {"q": zeros(2, 2, 4, 64)}, "q [num_tokens, num_heads, head_dim], got [2, 2, 4, 64]"),
    (prefill, {"q": zeros(4, 4, 72)}, "q of the cache's head_dim 64, got 72"),
    (prefill, {"q": zeros(4, 3, 64)}, "a multiple of the KV heads, got 3 and 2"),
    (
        prefill,
        {"q": zeros(4, 4, 64, dtype=F64)},
        "q in bfloat16, float16 or float32, got torch.float64",
    ),
    (
        prefill,
        {"q_scale": torch.ones(())},
        "q is torch.bfloat16, which has no scale: leave q_scale out",
    ),
    (
        prefill,
        {"cu_seqlens_q": ints(0, 1, 4, dtype=torch.int64)},
        "cu_seqlens_q as int32 [num_sequences + 1], got torch.int64 [3]",
    ),
    (prefill, {"cu_seqlens_q": ints(0, 4)}, "cu_seqlens_q of length 3 for 2 sequences, got 2"),
    (
        prefill,
        {"cu_seqlens_q": ints(0, 1, 5)},
        "cu_seqlens_q to rise from 0 to at most 4, got [0, 1, 5]",
    ),
    (prefill, {"sinks": zeros(2)}, "sinks of shape [4], got [2]"),
    (prefill, {"out_dtype": torch.int8}, "out_dtype bfloat16, float16 or float32, got torch.int8"),
    (
        prefill,
        {"cu_seqlens_q": ints(0, 1, 4).to("meta")},
        "cu_seqlens_q on cpu like q, got it on meta",
    ),
    (prefill, {"q": zeros(4, 4, 64, device="meta")}, "pages on meta like q, got it on cpu"),
    (prefill, {"num_cached_tokens": -1}, "num_cached_tokens must not be negative, got -1"),
    (
        prefill,
        {"impl": "fa3"},
        "impl for prefill_attention, one of gluon, triton, reference; got 'fa3'",
    ),
    (fp8_prefill, {"q_scale": None}, "q is torch.float8_e4m3fn: pass the q_scale"),
    (fp8_prefill, {"view": view(BF16)}, "FP8 pages for FP8 queries, got pages in torch.bfloat16"),
    (fp8_prefill, {"q_scale": torch.ones(2)}, "float32 scale of shape [4], got torch.float32 [2]"),
    (fp8_prefill, {"q_scale": torch.ones(1)}, "float32 scale of shape [4], got torch.float32 [1]"),
    (
        fp8_prefill,
        {"q_scale": torch.ones((), dtype=F64)},
        "float32 scale of shape [], got torch.float64 []",
    ),
    (
        fp8_prefill,
        {"q_scale": torch.ones(4, 4)},
        "float32 scale of shape [4], got torch.float32 [4, 4]",
    ),
    (
        fp8_prefill,
        {"q_scale": torch.ones((), device="meta")},
        "q_scale on cpu like q, got it on meta",
    ),
    # decode_attention
    (decode, {"q": zeros(2, 4, 64)}, "q [2, q_len, num_heads, head_dim], got [2, 4, 64]"),
    (decode, {"q": zeros(3, 1, 4, 64)}, "q [2, q_len, num_heads, head_dim], got [3, 1, 4, 64]"),
    (
        decode,
        {"q": zeros(2, 5, 4, 64)},
        "1 to 4 query tokens, got 5: use prefill_attention for more",
    ),
    (decode, {"spec": AttentionSpec(exponentials="codes")}, "takes FP8 queries, got torch.bfl"),
    (decode, {"q": zeros(2, 0, 4, 64)}, "1 to 4 query tokens, got 0"),
    (
        decode,
        {"q": zeros(2, 1, 4, 64, dtype=FP8)},
        "q in bfloat16, float16 or float32, got torch.float8_e4m3fn",
    ),
    (decode, {"q": zeros(2, 1, 4, 128)}, "q of the cache's head_dim 64, got 128"),
    (decode, {"q": zeros(2, 1, 5, 64)}, "a multiple of the KV heads, got 5 and 2"),
    (decode, {"sinks": zeros(5)}, "sinks of shape [4], got [5]"),
    (decode, {"sinks": zeros(4, device="meta")}, "sinks on cpu like q, got it on meta"),
    (decode, {"out_dtype": F64}, "out_dtype bfloat16, float16 or float32, got torch.float64"),
    (decode, {"impl": ""}, "impl for decode_attention, one of gluon, triton, reference; got ''"),
    # quantize
    (
        quantize_op,
        {"x": zeros(6, 32, dtype=F64)},
        "x in bfloat16, float16 or float32, got torch.float64",
    ),
    (
        quantize_op,
        {"x": zeros(6, dtype=FP8)},
        "x in bfloat16, float16 or float32, got torch.float8_e4m3fn",
    ),
    (
        quantize_op,
        {"x": zeros(6), "granularity": PerHead()},
        "granularity head needs a tensor of 2 or more dimensions, got shape [6]",
    ),
    (
        quantize_op,
        {"x": zeros(6), "granularity": PerBlock(2, 2)},
        "granularity block 2x2 needs a tensor of 2",
    ),
    (
        quantize_op,
        {"scale": torch.ones(6)},
        "granularity tensor of x [6, 32] needs a float32 scale of shape [], got torch.float32 [6]",
    ),
    (
        quantize_op,
        {"scale": torch.ones((), dtype=BF16)},
        "float32 scale of shape [], got torch.bfloat16 []",
    ),
    (
        quantize_op,
        {"scale": torch.ones(32), "granularity": PerToken()},
        "float32 scale of shape [6], got torch.float32 [32]",
    ),
    (quantize_op, {"scale": torch.ones((), device="meta")}, "scale on cpu like x, got it on meta"),
    (
        quantize_op,
        {"scale": torch.ones(()), "margin": 1.5},
        "margin and power_of_two shape dynamic scales",
    ),
    (
        quantize_op,
        {"scale": torch.ones(()), "power_of_two": True},
        "margin and power_of_two shape dynamic scales",
    ),
    (quantize_op, {"margin": 0.0}, "margin must be a positive finite number, got 0.0"),
    (quantize_op, {"margin": math.nan}, "margin must be a positive finite number, got nan"),
    (quantize_op, {"impl": "cuda"}, "impl for quantize, one of triton, reference; got 'cuda'"),
    # quantize_qkv
    (qkv, {"q": zeros(4, 64)}, "q [..., heads, head_dim], got [4, 64]"),
    (
        qkv,
        {"v": zeros(5, 2, 64, dtype=F64)},
        "v in bfloat16, float16 or float32, got torch.float64",
    ),
    (qkv, {"q": zeros(5, 3, 64)}, "a multiple of the KV heads, got 3 and 2"),
    (qkv, {"v": zeros(5, 1, 64)}, "k and v of one shape, got [5, 2, 64] and [5, 1, 64]"),
    (qkv, {"k": zeros(5, 2, 64, device="meta")}, "k on cpu like q, got it on meta"),
    (qkv, {"granularity": PerToken()}, "granularity tensor or head for q, k and v, got token"),
    (
        qkv,
        {"granularity": PerBlock(1, 64)},
        "granularity tensor or head for q, k and v, got block 1x64",
    ),
    (qkv, {"scales": scales(q=(3,))}, "float32 q scale of shape [] or [4], got torch.float32 [3]"),
    (
        qkv,
        {"scales": scales(k=(5, 2))},
        "float32 k scale of shape [] or [2], got torch.float32 [5, 2]",
    ),
    (
        qkv,
        {"scales": scales(dtype=BF16)},
        "float32 q scale of shape [] or [4], got torch.bfloat16 []",
    ),
    (qkv, {"scales": QkvScales.ones("meta")}, "the scale of q on cpu like q, got it on meta"),
    (
        qkv,
        {"scales": scales(), "history": tuple(AmaxHistory() for _ in "qkv")},
        "static scales or a history for dynamic ones, got both",
    ),
    (
        qkv,
        {"scales": scales(), "granularity": PerHead()},
        "static scales say their own granularity: leave granularity out",
    ),
    (
        qkv,
        {"history": (AmaxHistory(), AmaxHistory())},
        "a history of q, of k and of v, got 2 of them",
    ),
    (
        qkv,
        {"history": tuple(AmaxHistory((4,)) for _ in "qkv")},
        "history of q for amax values of shape [], got one for [4]",
    ),
    (
        qkv,
        {"history": tuple(AmaxHistory((4,)) for _ in "qkv"), "granularity": PerHead()},
        "history of k for amax values of shape [2], got one for [4]",
    ),
    (
        qkv,
        {"history": tuple(AmaxHistory().to("meta") for _ in "qkv")},
        "q's history on cpu like q, got it on meta",
    ),
    (qkv, {"impl": "cuda"}, "impl for quantize_qkv, one of triton, reference; got 'cuda'"),
    # scaled_mm
    (matmul, {"a": zeros(4, 31)}, "a [..., K] and b [columns, K], got [4, 31] and [6, 32]"),
    (matmul, {"a": zeros()}, "a [..., K] and b [columns, K], got [] and [6, 32]"),
    (matmul, {"b": of(zeros(6, 32, 1), PerTensor())}, "got [4, 32] and [6, 32, 1]"),
    (
        matmul,
        {"a": zeros(4, 32, dtype=F64)},
        "a in bfloat16, float16 or float32, got torch.float64",
    ),
    (
        matmul,
        {"a": zeros(4, 32, dtype=FP8)},
        "a in bfloat16, float16 or float32, got torch.float8_e4m3fn",
    ),
    (
        matmul,
        {"a": of(zeros(4, 32), PerChannel())},
        "a per tensor, token or block, got per channel",
    ),
    (matmul, {"a": of(zeros(4, 32), PerBlock(2, 32))}, "blocks of one row for a, got block 2x32"),
    (matmul, {"b": of(zeros(6, 32), PerToken())}, "b per tensor, channel or block, got per token"),
    (matmul, {"b": of(zeros(6, 32), PerHead())}, "b per tensor, channel or block, got per head"),
    (
        matmul,
        {"a": of(zeros(4, 32), PerBlock(1, 16)), "b": of(zeros(6, 32), PerBlock(2, 8))},
        "blocks of one width along K, got block 1x16 and block 2x8",
    ),
    (
        matmul,
        {"b": Quantized(zeros(6, 32, dtype=FP8), torch.ones(6, 1), PerChannel())},
        "channel of b [6, 32] needs a float32 scale of shape [6], got torch.float32 [6, 1]",
    ),
    (
        matmul,
        {"a": Quantized(zeros(4, 32, dtype=FP8), torch.ones(()), PerToken())},
        "token of a [4, 32] needs a float32 scale of shape [4], got torch.float32 []",
    ),
    (
        matmul,
        {"b": Quantized(zeros(6, 32, dtype=FP8), torch.ones(6, dtype=F64), PerChannel())},
        "float32 scale of shape [6], got torch.float64 [6]",
    ),
    (
        matmul,
        {"b": Quantized(zeros(6, 32), torch.ones(6), PerChannel())},
        "b's data in FP8, got torch.bfloat16",
    ),
    (matmul, {"bias": zeros(4)}, "bias of shape [6], got [4]"),
    (matmul, {"bias": zeros(1, 6)}, "bias of shape [6], got [1, 6]"),
    (
        matmul,
        {"bias": zeros(6, dtype=F64)},
        "bias in bfloat16, float16 or float32, got torch.float64",
    ),
    (matmul, {"bias": zeros(6, device="meta")}, "bias on cpu like a, got it on meta"),
    (matmul, {"out_dtype": FP8}, "out_dtype bfloat16, float16 or float32, got torch.float8_e4m3fn"),
    (matmul, {"impl": "fast"}, "impl for scaled_mm, one of torch, triton, reference; got 'fast'"),
]


@pytest.mark.parametrize(
    ("call", "changes", "message"), BAD, ids=[f"{row[0].__name__}-{row[2][:60]}" for row in BAD]
)
def test_a_wrong_call_is_refused(call, changes, message):
    with pytest.raises(ConfigError) as error:
        call(**changes)
    assert message in str(error.value)
    assert isinstance(error.value, ValueError)


def test_a_refused_call_changes_nothing():
    """Histories and pages are written only after every check."""
    history = tuple(AmaxHistory() for _ in "qkv")
    with pytest.raises(ConfigError):
        qkv(history=history, impl="nobody")
    assert [int(one.num_passes) for one in history] == [0, 0, 0]
    cache = view()
    before = cache.key_pages.clone()
    with pytest.raises(ConfigError):
        append(view=cache, value=zeros(3, 4, 64))
    with pytest.raises(ConfigError):
        append(view=cache, impl="nobody")
    assert torch.equal(cache.key_pages.view(torch.uint8), before.view(torch.uint8))


def test_a_length_beyond_the_page_table_is_refused():
    cache = view()
    cache = replace(cache, lengths=ints(3, cache.max_pages * cache.page_size + 1))
    with pytest.raises(ConfigError, match="expected at most .* tokens"):
        decode(view=cache)


def test_a_spec_is_checked_when_it_is_made():
    with pytest.raises(ConfigError, match="window must be"):
        attention(spec=AttentionSpec(window=0))

"""One attention layer of vLLM with octavo's implementation, against attention in float64."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from octavo_testkit.vllm_engine.engines import BACKEND, is_0_26
from octavo_testkit.vllm_engine.layer import (
    E4M3,
    HEAD_SIZE,
    HEADS,
    PAGE_SIZE,
    Case,
    Sequences,
    engine_of,
    make_layer,
    truth,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CASES = [
    Case("bf16"),
    Case("bf16 NHD", layout="NHD"),
    Case("bf16 all", window=20, softcap=4.0, sinks=True),
    Case("fp8", fp8=True),
    Case("fp8 NHD per head", fp8=True, per_head=True, layout="NHD"),
    Case("fp8 all", fp8=True, window=20, softcap=4.0, sinks=True, per_head=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_of_all_kinds_are_close_to_float64(models, case):
    cache = "fp8" if case.fp8 else "auto"
    with engine_of(models, kv_cache_dtype=cache) as config:
        layer, sinks = make_layer(config, case)
        builder = layer.get_attn_backend().get_builder_cls()(
            None, [layer.layer_name], config, torch.device("cpu")
        )
    sequences = Sequences([80, 70, 65])
    steps = [
        ([0, 1], [64, 33]),  # prompts
        ([0, 2], [1, 20]),  # decoding beside a chunk of a prompt
        ([0, 1, 2], [1, 1, 30]),
        ([0, 1], [1, 1]),  # decoding alone
        ([0, 1], [4, 4]),  # speculation
        ([2, 0], [15, 1]),  # a batch in another order
        ([1, 0], [4, 2]),
    ]
    kinds = set()
    for rows, counts in steps:
        spans, (q, k, v), common = sequences.step(rows, counts)
        batch = builder.build(0, common)
        kinds.add((batch.decodes is not None, batch.prompts is not None))
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, common.slot_mapping)
        output = torch.full((len(q), HEADS, HEAD_SIZE), torch.nan, dtype=torch.bfloat16)
        layer.impl.forward(layer, q, k, v, layer.kv_cache, batch, output)
        assert len(batch.plans) == (batch.decodes is not None)
        expected = truth(sequences, spans, case, sinks)
        error = (output.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        # e4m3 has 3 bits behind the point: about 2.5 % for each of Q, K, P and V.
        assert error < (0.06 if case.fp8 else 0.006), (rows, counts)
    assert kinds == {(True, True), (True, False), (False, True)}
    check_pages(sequences, layer, case)


def check_pages(sequences, layer, case):
    """The pages hold what vLLM expects there: keys before values, in units of their scales."""
    pages = layer.kv_cache.view(E4M3) if case.fp8 else layer.kv_cache
    page, place = int(sequences.table[0, 1]), 5
    stored = pages[page, :, place].float().split(HEAD_SIZE, -1)
    for x, data, scale in (
        (sequences.k, stored[0], layer._k_scale),
        (sequences.v, stored[1], layer._v_scale),
    ):
        token = x[0][PAGE_SIZE + place].float()
        found = data * scale.view(-1, 1) if case.fp8 else data
        torch.testing.assert_close(found, token, atol=1e-4, rtol=1 / 16 if case.fp8 else 0)


def test_padding_is_not_written_and_padded_requests_are_dropped(models):
    with engine_of(models) as config:
        layer, _ = make_layer(config, Case("bf16"))
        builder = layer.get_attn_backend().get_builder_cls()(
            None, [layer.layer_name], config, torch.device("cpu")
        )
    sequences = Sequences([8, 8])
    spans, (q, k, v), common = sequences.step([0], [8])
    slots = torch.cat([common.slot_mapping, torch.tensor([-1, -1])])
    k, v = (torch.cat([x, x[:2] + 7]) for x in (k, v))
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
    assert not layer.kv_cache[0].any()  # the page of slot -1, if it were one
    common.query_start_loc_cpu = torch.tensor([0, 8, 8, 8], dtype=torch.int32)
    common.seq_lens = torch.tensor([8, 0, 0], dtype=torch.int32)
    common.block_table_tensor = common.block_table_tensor.repeat(3, 1)
    batch = builder.build(0, common)
    assert batch.decodes is None
    assert len(batch.prompts) == 1
    output = torch.zeros(10, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    layer.impl.forward(layer, torch.cat([q, q[:2]]), k, v, layer.kv_cache, batch, output)
    expected = truth(sequences, spans, Case("bf16"), None)
    torch.testing.assert_close(output[:8].double(), expected, atol=0.02, rtol=0.02)
    assert not output[8:].any()


def test_the_run_that_measures_memory_gives_zeros(models):
    with engine_of(models) as config:
        layer, _ = make_layer(config, Case("bf16"))
    output = torch.full((3, HEADS, HEAD_SIZE), torch.nan)
    layer.impl.forward(layer, None, None, None, None, None, output)
    assert not output.any()


def test_what_the_layer_cannot_do_is_refused(models):
    from octavo.errors import UnsupportedError
    from octavo.integrations.vllm.attention import OctavoAttention

    with engine_of(models) as config:
        layer, _ = make_layer(config, Case("bf16"))
        for options, what in (
            ({"alibi_slopes": [0.1] * 4}, "ALiBi"),
            ({"attn_type": "encoder_only"}, "attention of type .*encoder_only"),
            ({"kv_cache_dtype": "int8_per_token_head"}, "a KV cache in int8_per_token_head"),
            ({"chunk_lookback": 3}, "layers with chunk_lookback"),
        ):
            with pytest.raises(UnsupportedError, match=f"OCTAVO does not support {what}"):
                OctavoAttention(4, 64, 0.1, 2, **options)
        with pytest.raises(UnsupportedError, match="quantized output"):
            one = torch.ones(())
            layer.impl.forward(layer, *[None] * 5, torch.zeros(1), output_scale=one)
        builder = layer.get_attn_backend().get_builder_cls()(
            None, [layer.layer_name], config, torch.device("cpu")
        )
        _, _, common = Sequences([8]).step([0], [8])
        common.causal = False
        with pytest.raises(UnsupportedError, match="causal"):
            builder.build(0, common)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({}, []),
        ({"kv_cache_dtype": "fp8"}, []),
        ({"has_sink": True, "has_sliding_window": True, "use_per_head_quant_scales": True}, []),
        ({"device_capability": (8, 0)}, []),
        (
            {"device_capability": (8, 0), "kv_cache_dtype": "fp8"},
            ["an FP8 KV cache needs compute capability 8.9 or newer"],
        ),
        ({"device_capability": (7, 5)}, ["compute capability not supported"]),
        ({"head_size": 512}, ["head_size not supported"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype not supported"]),
        ({"use_mla": True}, ["MLA not supported"]),
        ({"block_size": 24}, ["block_size not supported"]),
        ({"attn_type": "encoder_only"}, ["attention type encoder_only not supported"]),
    ],
)
def test_on_a_gpu_vllm_is_told_what_octavo_cannot_do(monkeypatch, options, reasons):
    """Asked on a CPU: no GPU has run this."""
    from vllm.platforms.interface import DeviceCapability

    from octavo.integrations.vllm import backend

    monkeypatch.setattr(backend, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    asked = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": (9, 0),
        "attn_type": "decoder",
        **options,
    }
    asked["device_capability"] = DeviceCapability(*asked["device_capability"])
    assert backend.OctavoBackend.validate_configuration(**asked) == reasons


@pytest.mark.skipif(is_0_26(), reason="vLLM 0.26 asks for the shape of pages alone")
def test_every_page_layout_is_taken_octavos_own_first():
    from vllm.v1.kv_cache_interface import KVCacheLayout

    from octavo.integrations.vllm.backend import OctavoBackend

    layouts = OctavoBackend.supported_kv_cache_layouts()
    assert layouts[0] is KVCacheLayout.LBHNC
    assert {*layouts} == {*KVCacheLayout}
    assert OctavoBackend.get_preferred_block_size(16) == 64


@pytest.mark.skipif(not is_0_26(), reason="later versions ask for layouts of pages")
def test_pages_have_the_shape_that_the_layer_reads():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from octavo.integrations.vllm.backend import OctavoBackend

    shapes = [
        b.get_kv_cache_shape(7, 32, 2, 64, "fp8") for b in (OctavoBackend, CPUAttentionBackend)
    ]
    assert shapes == [(7, 2, 32, 128)] * 2
    assert OctavoBackend.get_required_kv_cache_layout() == "HND"
    assert not OctavoBackend.indexes_kv_by_block_stride()


def test_registering_twice_changes_nothing():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from octavo.integrations.vllm.plugin import register

    register()
    before = [*AttentionBackendEnum]
    register()
    assert [*AttentionBackendEnum] == before
    assert AttentionBackendEnum[BACKEND].get_path().endswith("backend.OctavoBackend")


def test_a_process_without_plug_ins_can_read_the_name():
    """As the processes that vLLM spawns: they unpickle their settings first."""
    from octavo.integrations.vllm.plugin import backend_member

    member = backend_member()
    assert pickle.loads(pickle.dumps(member)) is member
    code = (
        "import pickle, sys\n"
        "print(pickle.loads(bytes.fromhex(sys.argv[1])).name)\n"
        "print('octavo.integrations.vllm.linear' in sys.modules)\n"
    )
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        written = pickle.dumps(member, protocol).hex()
        done = subprocess.run(
            [sys.executable, "-c", code, written], capture_output=True, text=True, timeout=120
        )
        assert done.stdout.splitlines()[-2:] == [BACKEND, "False"], done.stderr

"""Peers are found where they are installed, or named as missing."""

import lzma

import pytest
import torch
from torch.nn.attention import SDPBackend

from octavo.errors import UnsupportedError
from octavo.measure.bench import peers
from octavo.numerics.attention import AttentionSpec
from octavo.reference.attention import attention


def test_a_peer_that_is_not_installed(tmp_path):
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(UnsupportedError, match="fa3_fwd is not installed"):
        peers.fa3_fwd(tmp_path, True, q, q, q, False)
    with pytest.raises(UnsupportedError, match="vllm is not installed"):
        peers.vllm_fa3(None, False, q, q, q, False)


def test_a_packed_library_is_unpacked(tmp_path):
    (tmp_path / "deep").mkdir()
    packed = tmp_path / "deep" / "fa3_fwd_C.abi3.so.xz"
    packed.write_bytes(lzma.compress(b"library"))
    (path,) = peers._unpacked(tmp_path, "fa3_fwd_C.abi3.so")
    assert path.read_bytes() == b"library"


@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_gives_attention(is_causal):
    q, k, v = (torch.randn(1, 9, heads, 16) for heads in (4, 2, 2))
    call = peers.sdpa(SDPBackend.MATH, q, k, v, is_causal)
    expected, _ = attention(q, k, v, AttentionSpec(causal=is_causal))
    torch.testing.assert_close(call(), expected, rtol=0, atol=1e-5)


def test_a_backend_that_cannot():
    q = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError):
        peers.sdpa(SDPBackend.CUDNN_ATTENTION, q, q, q, False)


def test_fp8_operands_are_padded_to_16():
    q, k, v = (torch.randn(2, 3, heads, 72) for heads in (4, 2, 2))
    (q8, k8, v8), scales = peers._operands(q, k, v, True)
    assert q8.shape[-1] == k8.shape[-1] == v8.shape[-1] == 80
    assert [tuple(scale.shape) for scale in scales] == [(2, 2)] * 3
    assert peers._operands(q, k, v, False)[0] == (q, k, v)

"""Peers are found where they are installed, or named as missing."""

import ctypes
import lzma
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from octavo.errors import UnsupportedError
from octavo.measure.bench import peers
from octavo.measure.bench.peers import Inputs
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.error import relative_rms
from octavo.numerics.qkv import QkvScales
from octavo.reference.attention import attention, varlen_attention

ENDS = torch.tensor([0, 5, 5, 14], dtype=torch.int32)


def test_a_peer_that_is_not_installed(tmp_path):
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(UnsupportedError, match="fa3_fwd is not installed"):
        peers.fa3_fwd(tmp_path, True, Inputs((q, q, q)))
    with pytest.raises(UnsupportedError, match="vllm is not installed"):
        peers.vllm_fa3(None, False, Inputs((q, q, q)))


def test_a_packed_library_is_unpacked(tmp_path):
    (tmp_path / "deep").mkdir()
    packed = tmp_path / "deep" / "fa3_fwd_C.abi3.so.xz"
    packed.write_bytes(lzma.compress(b"library"))
    (path,) = peers._unpacked(tmp_path, "fa3_fwd_C.abi3.so")
    assert path.read_bytes() == b"library"


@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_gives_attention(is_causal):
    q, k, v = (torch.randn(1, 9, heads, 16) for heads in (4, 2, 2))
    call = peers.sdpa(SDPBackend.MATH, Inputs((q, k, v), is_causal=is_causal))
    expected, _ = attention(q, k, v, AttentionSpec(causal=is_causal))
    torch.testing.assert_close(call(), expected, rtol=0, atol=1e-5)


def test_a_backend_that_cannot():
    q = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError):
        peers.sdpa(SDPBackend.CUDNN_ATTENTION, Inputs((q, q, q)))


class Library:
    """FlashAttention-3 as octavo calls it: vLLM's by 37 places, fa3-fwd by names."""

    def fwd(self, q, k, v, *rest, **named):
        if rest:
            out, ends_q, ends_k = rest[3:6]
            max_q, max_k = rest[9:11]
            *scales, scale, is_causal = rest[17:22]
            assert rest[22:] == (-1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None)
        else:
            out, scale, is_causal = named["out"], named["softmax_scale"], named["is_causal"]
            scales = [named[f"{name}_descale"] for name in "qkv"]
            ends_q, ends_k = named.get("cu_seqlens_q"), named.get("cu_seqlens_k")
            max_q, max_k = named.get("max_seqlen_q"), named.get("max_seqlen_k")
        self.is_dense = ends_q is None
        spec = AttentionSpec(causal=is_causal, softmax_scale=scale)
        given = None
        if scales[0] is not None:
            num_sequences = len(q) if self.is_dense else len(ends_q) - 1
            assert all(one.shape == (num_sequences, k.shape[-2]) for one in scales)
            given = QkvScales(*(one[0, 0] for one in scales))
        if self.is_dense:
            result = attention(q, k, v, spec, given)[0]
        else:
            packing = Packing(ends_q, ends_k, max_q, max_k)
            result = varlen_attention(q, k, v, packing, spec, given)[0]
        out.copy_(result)


@pytest.fixture
def library(monkeypatch):
    one = Library()
    monkeypatch.setattr(peers, "load", lambda namespace, folder: one)
    return one


def three(*tokens):
    return [torch.randn(*tokens, heads, 72).bfloat16() for heads in (4, 2, 2)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("fp8", "error"), [(True, 0.07), (False, 0.005)])
@pytest.mark.parametrize(("peer", "is_dense"), [(peers.vllm_fa3, False), (peers.fa3_fwd, True)])
def test_flash_attention_of_a_dense_batch(library, peer, is_dense, fp8, error, is_causal):
    q, k, v = three(2, 9)
    actual = peer(None, fp8, Inputs((q, k, v), is_causal=is_causal))()
    assert actual.shape == q.shape and library.is_dense == is_dense
    expected, _ = attention(q, k, v, AttentionSpec(causal=is_causal))
    assert relative_rms(actual, expected) < error


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("fp8", "error"), [(True, 0.07), (False, 0.005)])
@pytest.mark.parametrize("peer", [peers.vllm_fa3, peers.fa3_fwd])
def test_flash_attention_of_packed_sequences(library, peer, fp8, error, is_causal):
    q, k, v = three(14)
    packing = Packing.same(ENDS, 9)
    actual = peer(None, fp8, Inputs((q, k, v), packing, is_causal))()
    assert actual.shape == q.shape and not library.is_dense
    expected, _ = varlen_attention(q, k, v, packing, AttentionSpec(causal=is_causal))
    assert relative_rms(actual, expected) < error


def test_vllm_with_fewer_queries_than_keys(library):
    q, k, v = three(1, 9)
    with pytest.raises(UnsupportedError, match="as many queries as keys"):
        peers.vllm_fa3(None, False, Inputs((q[:, :3], k, v)))


@pytest.mark.parametrize("packing", [None, Packing.same(torch.tensor([0, 1, 2]), 1)])
def test_fp8_operands_are_padded_to_16(packing):
    q, k, v = three(2, 3) if packing is None else three(2)
    (q8, k8, v8), scales = peers._operands(True, Inputs((q, k, v), packing))
    assert q8.shape[-1] == k8.shape[-1] == v8.shape[-1] == 80
    assert [tuple(scale.shape) for scale in scales] == [(2, 2)] * 3
    assert peers._operands(False, Inputs((q, k, v), packing))[0] == (q, k, v)


@pytest.fixture
def no_cudnn(monkeypatch):
    """As if cuDNN's frontend had not been imported, nor its folder found."""
    before = sys.modules.pop("cudnn", None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("cudnn", None)
    if before is not None:
        sys.modules["cudnn"] = before


def test_cudnn_in_a_folder(no_cudnn, tmp_path):
    package = tmp_path / "frontend" / "1.0" / "cudnn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("place = __file__\n")
    assert peers.load_cudnn(tmp_path).place == str(package / "__init__.py")
    assert sys.path[0] == str(package.parent)


def test_cudnn_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(UnsupportedError, match="nvidia-cudnn-frontend is not installed"):
        peers.cudnn_fp8(tmp_path, Inputs((q, q, q)))


def test_libraries_beside_torch_are_loaded(monkeypatch, tmp_path):
    names = {"cudnn": "libcudnn.so.9", "cu13": "libcudart.so.13"}
    for folder, name in names.items():
        for site in ("site", "other"):
            path = tmp_path / site / "nvidia" / folder / "lib" / name
            path.parent.mkdir(parents=True)
            path.touch()
    loaded = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append((path, mode)))
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("none", "site", "other")])
    fake = SimpleNamespace(zeros=lambda *_, device: None, version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setattr(peers, "torch", fake)
    peers._load_cuda_libraries()
    site = tmp_path / "site" / "nvidia"
    assert loaded == [
        (str(site / folder / "lib" / name), ctypes.RTLD_GLOBAL) for folder, name in names.items()
    ]

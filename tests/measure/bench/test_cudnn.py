"""cuDNN's graph is given what its frontend wants: a model of it computes from what it was told."""

import math
from types import SimpleNamespace

import pytest
import torch

from octavo.errors import UnsupportedError
from octavo.measure.bench import peers
from octavo.measure.bench.peers import Inputs
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.error import relative_rms
from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import saturating_cast
from octavo.reference.attention import attention, varlen_attention

DTYPES = {"FP8": torch.float8_e4m3fn, "float": torch.float32, "i4": torch.int32, "i8": torch.int64}


class Tensor:
    """A tensor of a graph: sizes and strides, and where sequences start if they are packed."""

    def __init__(self, dim=None, stride=None, data_type=None):
        self.dim, self.stride, self.kind, self.starts = dim, stride, data_type, None
        self.is_output = False

    def set_output(self, value):
        self.is_output = value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, kind):
        self.kind = kind
        return self

    def set_ragged_offset(self, starts):
        self.starts = starts
        return self

    def sequence(self, pack, index, length):
        """[heads, tokens, head_dim] of one sequence, where the graph would look for it."""
        _, num_heads, longest, head_dim = self.dim
        assert length <= longest
        start = index * self.stride[0]
        if self.starts is not None:
            assert self.starts.kind == "i8" and self.starts.dim == [self.dim[0] + 1, 1, 1, 1]
            start = int(pack[self.starts].flatten()[index])
        return pack[self].as_strided((num_heads, length, head_dim), self.stride[1:], start)


class Graph:
    """sdpa_fp8 in float32, one sequence after the other."""

    is_supported = True

    def __init__(self, **options):
        assert options["io_data_type"] == "FP8" and options["compute_data_type"] == "float"

    def tensor(self, dim, stride, data_type):
        return Tensor(dim, stride, data_type)

    def sdpa_fp8(self, **inputs):
        assert inputs.pop("generate_stats") is False
        self.inputs, self.outputs = inputs, (Tensor(), None, Tensor(), Tensor())
        return self.outputs

    def validate(self):
        packed = [self.inputs[name].starts for name in "qkv"] + [self.outputs[0].starts]
        assert len({one is None for one in packed}) == 1
        assert (packed[0] is not None) == self.inputs.get("use_padding_mask", False)

    def build_operation_graph(self):
        for one in (self.outputs[0], *self.outputs[2:]):
            assert one.is_output and one.dim and one.stride and one.kind

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]

    def check_support(self):
        if not self.is_supported:
            raise NotSupportedError("no engine\nin several lines")

    def build_plans(self):
        pass

    def get_workspace_size(self):
        return 0

    def execute(self, pack, workspace, handle):
        assert workspace.numel() == 1 and handle == "handle"
        for one, value in pack.items():
            assert value.dtype == DTYPES[one.kind]
            assert one.starts is not None or value.numel() == math.prod(one.dim)
        factors = {name: float(pack[self.inputs[name]]) for name in FACTORS}
        assert factors["descale_s"] * factors["scale_s"] == pytest.approx(1)
        for index, length in enumerate(self._lengths(pack)):
            q, k, v = (
                self.inputs[name].sequence(pack, index, length).float() * factors[f"descale_{name}"]
                for name in "qkv"
            )
            spec = AttentionSpec(
                causal=self.inputs.get("right_bound") == 0, softmax_scale=self.inputs["attn_scale"]
            )
            rows = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            out = attention(*rows, spec)[0][0].transpose(0, 1) * factors["scale_o"]
            self.outputs[0].sequence(pack, index, length).copy_(saturating_cast(out, E4M3))

    def _lengths(self, pack):
        num_sequences, _, longest, _ = self.inputs["q"].dim
        if "seq_len_q" not in self.inputs:
            return [longest] * num_sequences
        lengths = [pack[self.inputs[name]].flatten().tolist() for name in LENGTHS]
        assert lengths[0] == lengths[1] and len(lengths[0]) == num_sequences
        return lengths[0]


FACTORS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
LENGTHS = ("seq_len_q", "seq_len_kv")


class NotSupportedError(Exception):
    pass


@pytest.fixture
def cudnn(monkeypatch):
    module = SimpleNamespace(
        data_type=SimpleNamespace(FP8_E4M3="FP8", FLOAT="float", INT32="i4", INT64="i8"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        cudnnGraphNotSupportedError=NotSupportedError,
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
        pygraph=Graph,
    )
    monkeypatch.setattr(peers, "load_cudnn", lambda folder: module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return module


def three(*tokens, head_dim):
    return [torch.randn(*tokens, heads, head_dim).bfloat16() for heads in (4, 2, 2)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_a_dense_batch(cudnn, head_dim, is_causal):
    q, k, v = three(2, 9, head_dim=head_dim)
    actual = peers.cudnn_fp8(None, Inputs((q, k, v), is_causal=is_causal))().dequantize()
    expected, _ = attention(q, k, v, AttentionSpec(causal=is_causal))
    assert actual.shape == q.shape
    assert relative_rms(actual, expected) < 0.07


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_packed_sequences(cudnn, head_dim, is_causal):
    q, k, v = three(18, head_dim=head_dim)
    packing = Packing.same(torch.tensor([0, 9, 10, 15, 18], dtype=torch.int32), 9)
    actual = peers.cudnn_fp8(None, Inputs((q, k, v), packing, is_causal))().dequantize()
    expected, _ = varlen_attention(q, k, v, packing, AttentionSpec(causal=is_causal))
    assert actual.shape == q.shape
    assert relative_rms(actual, expected) < 0.07


def test_what_cudnn_does_not_support(cudnn, monkeypatch):
    monkeypatch.setattr(Graph, "is_supported", False)
    with pytest.raises(UnsupportedError, match="^no engine$"):
        peers.cudnn_fp8(None, Inputs(tuple(three(1, 4, head_dim=16))))

"""Triton kernels run in its interpreter where there is no GPU, with its arithmetic put right."""

import os
import re
import warnings

import numpy as np
import pytest
import torch

from octavo.numerics.formats import format_of, is_fp8
from octavo.numerics.quantize import saturating_cast

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before any is imported

import triton.language as tl
from triton.runtime import interpreter

DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
convert_float = interpreter._convert_float
# Cases that take the interpreter long and have a smaller sibling: slow where there is no GPU.
LONG_CASES = re.compile(
    r"""
    test_attention.py::test_lengths\[(batch|q_len=130|q_len=63|q_len=129-torch.bfloat16)
    | test_attention.py::test_packed\[q_lens=\(65
    | test_attention.py::test_packed\[.*-token\]
    | test_attention.py::test_scales\[(2|None|1-head)
    | test_attention_infinite_logits.py::test_attention\[\w+-torch.bfloat16
    | test_prefill.py::test_pages\[(head_major-(32|128)|token_major-(16|128))
    | test_prefill.py::test_scales_and_dtypes\[torch.float8_(e5m2|e4m3fn-head)
    | test_quantize_qkv.py::test_padding_is_not_looked_at\[(1|16|37)-
    | test_quantize_qkv.py::test_histories_go_round\[head
    | test_quantize_qkv.py::test_rotary\[.*-head
    | test_quantize_qkv_streams.py::test_streams\[(odd|tiles|norms-(head|tensor))
    | test_quantize_qkv_streams.py::test_histories\[head
    | test_quantize_qkv_streams.py::test_streams_without_tokens\[2-\(0,\ (0|3)
    | test_matvec.py::test_(columns|depths)\[\d+-(2049|2880)
    """,
    re.VERBOSE,
)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if LONG_CASES.search(item.nodeid):
                item.add_marker(pytest.mark.slow)


def convert(data, source, target, rounding_mode):
    """A float cast as GPUs do it: Triton 3.6's loses carries, saturation and NaN of FP8."""
    if source not in DTYPES or target not in DTYPES:
        return convert_float(data, source, target, rounding_mode)
    bits = np.ascontiguousarray(data).view(f"uint{source.primitive_bitwidth}")
    x = torch.from_numpy(bits).view(DTYPES[source]).float()
    dtype = DTYPES[target]
    y = saturating_cast(x, format_of(dtype)) if is_fp8(dtype) else x.to(dtype)
    return y.view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy().reshape(data.shape)


def dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    """A matrix product in float32: Triton 3.6's multiplies the bits of bfloat16 as integers."""
    x, y = (convert(t.data, t.dtype.scalar, tl.float32, None).view(np.float32) for t in (a, b))
    return interpreter.TensorHandle(np.matmul(x, y) + d.data, d.dtype.scalar)


@pytest.fixture(autouse=True)
def right_casts(monkeypatch):
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    # The interpreter makes loop bounds of arrays with one element.
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
    with np.errstate(all="ignore"):  # GPUs divide by zero in silence
        yield


@pytest.fixture
def device():
    """Where kernels run: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

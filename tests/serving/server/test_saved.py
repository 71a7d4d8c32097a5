"""The bytes that FP8 saves: counted from tensors, less the scales."""

import pytest
import torch

pytest.importorskip("fastapi")

import octavo
from octavo.serving.engine.precision import CachePart
from octavo.serving.server.saved import saved_bytes


def model(dtype):
    found = torch.nn.Sequential(*(torch.nn.Linear(64, 128, dtype=dtype) for _ in range(2)))
    found.dtype = dtype  # as models of transformers and diffusers have it
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_and_what_their_scales_cost(dtype):
    def num_bytes(one):
        return sum(x.nbytes for x in (*one.parameters(), *one.buffers()))

    plain = model(dtype)
    assert saved_bytes([plain]) == {}
    before = num_bytes(plain)
    octavo.quantize_(plain, "fp8")
    assert saved_bytes([plain]) == {"linear layers": before - num_bytes(plain)}
    assert saved_bytes([plain, plain])["linear layers"] == 2 * (before - num_bytes(plain))


def test_pages_in_fp8_alone_count_and_their_scales_are_taken_off():
    pages = CachePart(kind="full_attention", dtype="float8_e4m3fn", part="pages", num_bytes=1000)
    scales = CachePart(kind="full_attention", dtype="float32", part="scales", num_bytes=40)
    window = CachePart(kind="sliding_window", dtype="bfloat16", part="pages", num_bytes=500)
    assert saved_bytes([model(torch.bfloat16)], [pages, scales, window]) == {"KV cache": 960}
    assert saved_bytes([model(torch.float32)], [pages]) == {"KV cache": 3000}
    assert saved_bytes([model(torch.bfloat16)], [window]) == {}

"""AmaxHistory inside a CUDA graph."""

import math

import pytest
import torch

from octavo.numerics.amax import AmaxHistory
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
def test_a_replayed_graph_counts_like_eager_calls(granularity):
    shape = granularity.scale_shape((5, 3, 72))
    captured, eager = AmaxHistory(shape).cuda(), AmaxHistory(shape).cuda()
    x = torch.zeros(5, 3, 72, device="cuda", dtype=torch.bfloat16)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.observe(x, granularity)
        captured.scale()
    torch.cuda.current_stream().wait_stream(stream)
    captured.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.observe(x, granularity)
        scale = captured.scale()
    captured.reset()

    draw = Draw(0, "cuda")
    for i in range(40):
        fresh = draw.wide(5, 3, 72, dtype=torch.bfloat16)
        if i % 7 == 0:
            fresh[i % 5, i % 3, i] = (math.nan, math.inf)[i % 2]
        x.copy_(fresh)
        graph.replay()
        eager.observe(fresh, granularity)
        assert_same_bits(scale, eager.scale())
    for ours, theirs in zip(captured.ring, eager.ring, strict=True):
        assert_same_bits(ours, theirs)
    assert int(captured.num_passes) == 40
    assert int(captured.num_nonfinite) == 6

"""How a step's batch is split; none of this needs vLLM."""

import pytest

from octavo.integrations.vllm.batch import count_decodes


@pytest.mark.parametrize(
    ("query_lens", "expected"),
    [
        ([], (0, 0)),
        ([1], (1, 1)),
        ([1, 1, 1], (3, 1)),
        ([1, 1, 7, 1], (2, 1)),
        ([4, 4, 4], (3, 4)),
        ([4, 1, 1], (1, 4)),
        ([2, 2, 90], (2, 2)),
        ([5, 1, 1], (0, 0)),
        ([90], (0, 0)),
        ([0, 1], (0, 0)),
    ],
)
def test_equally_short_queries_at_the_front_are_decoded(query_lens, expected):
    assert count_decodes(query_lens) == expected

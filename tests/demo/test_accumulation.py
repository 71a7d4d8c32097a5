"""The needle: what one-level accumulation loses and two levels keep."""

import pytest
import torch

from octavo.demo.attention_errors import accumulation_errors, make_needle


@pytest.mark.parametrize("seed", range(4))
def test_the_needle_is_all_that_remains(seed):
    needle = make_needle(1024, seed=seed)
    total = needle.v.sum(dim=1).flatten()
    assert int(total.argmax()) == needle.channel
    others = torch.arange(64) != needle.channel
    assert total[others].abs().max() <= 1  # the needle stands in the place of one key
    for x in (needle.q, needle.k, needle.v):
        assert torch.equal(x.to(torch.float8_e4m3fn).float(), x)


def test_short_contexts_are_found_either_way():
    records = list(accumulation_errors([1024]))
    assert [r.case["accumulation"] for r in records] == ["two-level", "one-level"]
    assert all(r.values["is_found"] == 1 and r.values["relative_rms"] < 1e-6 for r in records)


@pytest.mark.slow
def test_at_131072_keys_one_level_loses_the_needle():
    two_level, one_level = accumulation_errors([131072])
    assert two_level.values["is_found"] == 1
    assert two_level.values["relative_rms"] < 1e-6
    assert one_level.values["is_found"] == 0
    assert one_level.values["relative_rms"] > 10

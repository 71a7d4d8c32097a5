"""Observers against brute force over the values themselves."""

import math

import pytest
import torch

from octavo import ConfigError
from octavo.calibration.observers import CalibrationSettings, Histogram, LayerObserver
from octavo.numerics.error import sqnr_db
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.quantize import quantize

NUM_PASSES, HEADS, HEAD_DIM = 5, 3, 8
PERCENTILE = CalibrationSettings(observer="percentile", percentile=99)
MSE = CalibrationSettings(observer="mse")


def passes(dtype=torch.bfloat16, spread=1.0):
    """Passes of growing values with heavy tails: the histogram moves up between them."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 50, HEADS, HEAD_DIM)
    made = [torch.randn(shape, generator=generator) ** 3 for _ in range(NUM_PASSES)]
    heads = torch.tensor([1.0, spread, spread**2])[:, None]
    return [(x * heads * 4.0**i).to(dtype) for i, x in enumerate(made)]


def seen(xs, num_groups):
    histogram = Histogram(num_groups)
    for x in xs:
        histogram.add(x)
    return histogram


def by_group(xs, num_groups):
    """Absolute values of each group, sorted: [num_groups, values]."""
    everything = torch.cat([x.reshape(-1, HEADS, HEAD_DIM) for x in xs]).float().abs()
    groups = everything.transpose(0, 1) if num_groups > 1 else everything
    return groups.reshape(num_groups, -1).sort(dim=1).values


@pytest.mark.parametrize("num_groups", [1, HEADS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amax_and_percentile_are_those_of_all_values(num_groups, dtype):
    xs = passes(dtype, spread=0.1)
    histogram, values = seen(xs, num_groups), by_group(xs, num_groups)
    assert torch.equal(histogram.amax, values[:, -1])
    assert int(histogram.counts.sum()) == values.numel()
    rank = math.ceil(0.99 * values.shape[1])
    expected = values[:, rank - 1]
    found = histogram.limits(PERCENTILE)
    tolerance = 0 if dtype == torch.bfloat16 else 1 / 256
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("num_groups", [1, HEADS])
def test_mse_is_the_best_of_a_brute_force_search(num_groups):
    xs = [*passes(spread=0.1), 300 * passes()[0]]
    limits, values = seen(xs, num_groups).limits(MSE), by_group(xs, num_groups)
    for group, limit in zip(values, limits, strict=True):
        candidates = [float(group[-1]) * 2 ** (-step / 16) for step in range(97)]
        errors = []
        for candidate in candidates:
            scale = torch.tensor(candidate / 448)
            back = quantize(group, PerTensor(), scale=scale).dequantize()
            errors.append(float(((back - group).double() ** 2).sum()))
        best = min(range(len(errors)), key=errors.__getitem__)
        assert float(limit) == pytest.approx(candidates[best], rel=1e-6)


def test_mse_errs_less_than_the_others():
    histogram = seen(passes(), 1)
    noise = {}
    for settings in (CalibrationSettings(), PERCENTILE, MSE):
        noise[settings.observer] = float(histogram.errors(histogram.limits(settings) / 448)[0])
    assert noise["mse"] <= noise["amax"]
    assert noise["mse"] < noise["percentile"]


def test_mse_clips_a_lone_outlier_for_the_sake_of_many():
    # With the outlier at 448 the many lie halfway between two numbers of e4m3, 408 of 416 and 400.
    x = torch.full((1000, 1, 8), 408.0)
    x[0, 0, 0] = 448.0
    histogram = seen([x], 1)
    limit = float(histogram.limits(MSE))
    assert limit < 448
    at_limit, at_amax = (float(histogram.errors(torch.tensor([n / 448]))[0]) for n in (limit, 448))
    assert at_limit < 0.7 * at_amax


@pytest.mark.parametrize("num_groups", [1, HEADS])
def test_sqnr_is_that_of_quantizing_the_values(num_groups):
    xs = passes(spread=0.1)
    histogram = seen(xs, num_groups)
    scale = histogram.amax / 300  # the largest saturate
    everything = torch.cat([x.reshape(-1, HEADS, HEAD_DIM) for x in xs])
    given = scale if num_groups > 1 else scale.squeeze()
    granularity = PerHead() if num_groups > 1 else PerTensor()
    back = quantize(everything, granularity, scale=given).dequantize()
    assert histogram.sqnr_db(scale) == pytest.approx(sqnr_db(back, everything.float()), abs=1e-3)


def test_the_order_of_passes_does_not_matter():
    xs = passes()
    one, other = seen(xs, 1), seen(xs[::-1], 1)
    assert one.first_code == other.first_code
    assert torch.equal(one.counts, other.counts)


def test_values_far_below_the_largest_count_as_zeros():
    small = torch.full((4, 1, 8), 1e-30)
    histogram = seen([small], 1)
    assert int(histogram.counts[0, 0]) == 0
    histogram.add(torch.full((4, 1, 8), 1e6))
    assert int(histogram.counts[0, 0]) == 32
    assert int(histogram.counts.sum()) == 64


@pytest.mark.parametrize("num_groups", [1, 2])
def test_what_is_not_finite_is_counted_and_never_enters(num_groups):
    x = torch.ones(10, 2, 4)
    x[0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    histogram = seen([x], num_groups)
    assert int(histogram.num_nonfinite) == 3
    assert int(histogram.counts.sum()) == 77
    assert histogram.amax.tolist() == [1.0] * num_groups
    assert histogram.limits(PERCENTILE).tolist() == [1.0] * num_groups


def test_the_largest_float32_has_a_bin():
    histogram = seen([torch.full((1, 1, 4), torch.finfo(torch.float32).max)], 1)
    assert int(histogram.counts[0, 1:].sum()) == 4
    assert math.isfinite(float(histogram.limits(PERCENTILE)))


@pytest.mark.parametrize("x", [torch.zeros(4, 2, 8), torch.zeros(0, 2, 8)])
def test_zeros_and_nothing(x):
    histogram = seen([x], 2)
    assert histogram.amax.tolist() == [0.0, 0.0]
    for settings in (CalibrationSettings(), PERCENTILE, MSE):
        assert histogram.limits(settings).tolist() == [0.0, 0.0]
    assert int(histogram.counts.sum()) == x.numel()


def test_one_value():
    histogram = seen([torch.tensor([[[-3.0]]])], 1)
    for settings in (CalibrationSettings(), PERCENTILE, MSE):
        assert histogram.limits(settings).item() <= 3.0
    assert histogram.limits(PERCENTILE).item() == 3.0


def test_another_number_of_heads_is_refused():
    histogram = seen([torch.ones(4, 2, 8)], 2)
    with pytest.raises(ConfigError, match="expected 2 heads as in the passes before, got 3"):
        histogram.add(torch.ones(4, 3, 8))


def test_large_tensors_are_counted_in_chunks(monkeypatch):
    xs = passes()
    expected = seen(xs, HEADS)
    monkeypatch.setattr("octavo.calibration.observers._CHUNK_SIZE", 7 * HEADS * HEAD_DIM)
    found = seen(xs, HEADS)
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.amax, expected.amax)


def test_state_goes_on_where_it_was():
    xs = passes()
    whole, half = (LayerObserver.like(xs[0], xs[0], xs[0], "head") for _ in range(2))
    for x in xs:
        whole.see(x, 2 * x, 3 * x)
    for x in xs[:2]:
        half.see(x, 2 * x, 3 * x)
    half = LayerObserver.from_state_dict(half.state_dict())
    for x in xs[2:]:
        half.see(x, 2 * x, 3 * x)
    assert half.num_passes == whole.num_passes == NUM_PASSES
    for name, part in whole.parts.items():
        assert torch.equal(half.parts[name].counts, part.counts)
        assert torch.equal(half.parts[name].amax, part.amax)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"observer": "median"}, "observer: expected 'amax', 'percentile' or 'mse', got 'median'"),
        ({"percentile": 0}, "percentile: expected a number greater than 0, got 0"),
        ({"percentile": 100.1}, "percentile: expected a number less than or equal to 100"),
        ({"margin": 0}, "margin: expected a number greater than 0"),
        ({"margin": math.nan}, "margin: expected a finite number"),
        ({"granularity": "token"}, "granularity: expected 'tensor' or 'head', got 'token'"),
    ],
)
def test_settings_out_of_range(field, message):
    with pytest.raises(ConfigError, match=message):
        CalibrationSettings(**field)


@pytest.mark.gpu
def test_on_a_gpu_the_counts_are_the_same():
    xs = passes()
    expected, found = seen(xs, HEADS), seen([x.cuda() for x in xs], HEADS)
    assert torch.equal(found.counts.cpu(), expected.counts)
    assert torch.equal(found.amax.cpu(), expected.amax)

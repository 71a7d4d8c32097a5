"""Sampling the time of a call."""

import time

import pytest
import torch

from octavo.errors import ConfigError
from octavo.measure.bench.timing import sample_ms, sample_sustained_ms

CPU = torch.device("cpu")


def test_samples_are_times_of_single_calls():
    samples = sample_ms(lambda: time.sleep(0.002), CPU, warmup_ms=2, budget_ms=10)
    assert len(samples) >= 5
    assert all(2 <= sample < 200 for sample in samples)


def test_the_budget_ends_sampling():
    assert len(sample_ms(lambda: time.sleep(0.001), CPU, warmup_ms=0, budget_ms=50)) <= 50


def test_a_slow_call_still_gets_its_samples():
    samples = sample_ms(lambda: time.sleep(0.002), CPU, warmup_ms=0, budget_ms=0, min_samples=3)
    assert len(samples) == 3


def test_a_quick_call_stops_at_the_limit():
    assert len(sample_ms(lambda: None, CPU, budget_ms=1e9, warmup_ms=0, max_samples=20)) == 20


@pytest.mark.parametrize(("least", "most"), [(0, 5), (6, 5)])
def test_limits_that_contradict_each_other(least, most):
    with pytest.raises(ConfigError, match=f"got {least} and {most}"):
        sample_ms(lambda: None, CPU, min_samples=least, max_samples=most)


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock():
    cycles = 10_000_000
    samples = sample_ms(lambda: torch.cuda._sleep(cycles), torch.device("cuda"), budget_ms=50)
    assert 1 < min(samples) <= max(samples) < 100


def test_a_load_takes_time():
    with pytest.raises(ConfigError, match="more than 0 seconds, got 0"):
        sample_sustained_ms(lambda: None, load_s=0)


@pytest.mark.gpu
def test_under_load_the_clock_and_the_power_are_read():
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    samples, seen = sample_sustained_ms(lambda: x @ x, load_s=0.3)
    assert len(samples) == 15 and all(0.01 < ms < 100 for ms in samples)
    assert 300 < seen["sm_mhz"] < 4000
    assert 30 < seen["watts"] < 2000

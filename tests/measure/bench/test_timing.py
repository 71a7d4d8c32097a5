"""Sampling the time of a call."""

import time

import pytest
import torch

from octavo.errors import ConfigError
from octavo.measure.bench.timing import sample_in_turn_ms, sample_sustained_ms

CPU = torch.device("cpu")


def test_samples_are_times_of_single_calls():
    calls = [lambda: time.sleep(0.002), lambda: time.sleep(0.008)]
    short, long = sample_in_turn_ms(calls, CPU, warmup_ms=0, num_samples=3)
    assert len(short) == len(long) == 3
    assert all(2 <= sample < 200 for sample in short) and all(8 <= sample < 200 for sample in long)


def test_calls_take_turns_after_the_warm_up():
    seen = []
    calls = [lambda: seen.append("a") or time.sleep(0.002), lambda: seen.append("b")]
    sample_in_turn_ms(calls, CPU, warmup_ms=1, num_samples=2)
    assert seen == ["a", "b"] * 3
    assert sample_in_turn_ms([], CPU) == []


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock():
    cycles = 10_000_000
    (samples,) = sample_in_turn_ms([lambda: torch.cuda._sleep(cycles)], torch.device("cuda"))
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


def test_slow_calls_have_fewer_samples():
    calls = [lambda: time.sleep(0.002), lambda: None]
    few = sample_in_turn_ms(calls, CPU, warmup_ms=0, num_samples=50, limit_ms=12)
    assert [len(samples) for samples in few] == [len(few[0])] * 2
    assert 3 <= len(few[0]) <= 6
    assert [len(s) for s in sample_in_turn_ms(calls, CPU, warmup_ms=0, limit_ms=0)] == [3, 3]

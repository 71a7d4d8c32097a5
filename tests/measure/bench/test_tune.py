"""A search keeps the fastest settings, after every candidate gave the right result.

Calls in other processes compile before anything is timed.
"""

import json
import time
from dataclasses import dataclass

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import tuning
from octavo.kernels.device import CPU, Device
from octavo.measure.bench.benchmark import Benchmark, Participant
from octavo.measure.bench.kernels import (
    SEARCHES,
    SUITES,
    Search,
    Task,
    name_of,
    precompile,
    run_task,
    searches,
    tasks,
    tune,
)

HERE = Device(type="cpu", name="NVIDIA H200", capability=(9, 0))


@dataclass(frozen=True)
class Wait:
    ms: float
    is_wrong: bool = False


def search(*configs):
    def prepare(config, inputs):
        def call():
            time.sleep(config.ms / 1e3)
            return inputs * (3 if config.is_wrong else 2)

        return call

    like = Participant("any", "FP8", lambda inputs: lambda: inputs, 0.01, 8)
    benchmark = Benchmark(
        op="wait",
        case={"shape": "1"},
        make_inputs=lambda seed: torch.ones(2),
        truth=lambda inputs: inputs * 2,
        participants=(like,),
    )
    return Search.of(("short", list(configs)), benchmark, prepare)


@pytest.mark.parametrize(
    ("configs", "winner"),
    [
        ((Wait(8), Wait(1), Wait(4)), 1),
        ((Wait(2), Wait(6)), 2),  # the default stays if nothing beats it
    ],
)
def test_the_fastest_is_kept(configs, winner, tmp_path):
    records = tune(search(*configs), HERE, tmp_path, "pytest")
    assert json.loads((tmp_path / "h200.json").read_text()) == {
        "wait": {"short": {"ms": winner, "is_wrong": False}}
    }
    won = [record for record in records if record.case["is_winner"]]
    assert [record.impl for record in won] == [name_of(Wait(winner))]
    assert {record.case["problem"] for record in records} == {"short"}


def test_wrong_settings_end_the_search(tmp_path):
    with pytest.raises(UnsupportedError, match="is wrong"):
        tune(search(Wait(2), Wait(1, is_wrong=True)), HERE, tmp_path, "pytest")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("op", SEARCHES)
def test_settings_are_tuned_on_a_gpu(op):
    with pytest.raises(UnsupportedError, match="on the GPU they are for, got CPU"):
        searches(op, CPU)


def test_an_op_without_settings():
    with pytest.raises(ConfigError, match="with settings to tune, one of .*; got 'wait'"):
        searches("wait", HERE)


def test_attention_is_tuned_once_for_each_head_dim():
    found = searches("attention", Device(type="cuda", name="NVIDIA H200", capability=(9, 0)))
    sizes = [size for size in SUITES["attention"].large if not size.is_causal]
    assert len({one.problem for one in found}) == len(found) == len(sizes)
    assert not any(one.benchmark.case["causal"] for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize("op", SEARCHES)
def test_what_is_tuned_on_a_gpu(op):
    from octavo.kernels.device import default_device

    for one in searches(op, default_device()):
        assert len(one.configs) == len(one.benchmark.participants) > 1
        assert one.benchmark.op == op and tuning.file_name(default_device()).endswith(".json")


def test_every_participant_is_a_task():
    found = tasks("quantize")
    assert found == [Task("quantize", 0, entry) for entry in range(3)]
    for task in found:
        run_task(task)  # those that this machine cannot run end in silence


def test_a_search_needs_a_gpu():
    with pytest.raises(UnsupportedError, match="on the GPU they are for"):
        tasks("quantize", is_search=True)


def test_a_task_that_fails_is_not_swallowed():
    with pytest.raises(ConfigError, match="got 'nothing'"):
        run_task(Task("nothing", 0, 0))


@pytest.mark.slow
def test_tasks_run_in_other_processes():
    found = tasks("quantize")
    assert set(precompile(found, jobs=2)) == set(found)

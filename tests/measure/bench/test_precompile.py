"""Calls in other processes, so that what they compile is there when it is timed."""

import pytest

from octavo.errors import ConfigError, UnsupportedError
from octavo.measure.bench.precompile import (
    Task,
    precompile,
    run_task,
    tasks_of_benchmarks,
    tasks_of_searches,
)


def test_every_contender_is_a_task():
    tasks = tasks_of_benchmarks("quantize", None)
    assert tasks == [Task("quantize", 0, entry) for entry in range(3)]
    for task in tasks:
        run_task(task)  # those that this machine cannot run end in silence


def test_a_search_needs_a_gpu():
    with pytest.raises(UnsupportedError, match="on the GPU they are for"):
        tasks_of_searches("quantize")


def test_a_task_that_fails_is_not_swallowed():
    with pytest.raises(ConfigError, match="got 'nothing'"):
        run_task(Task("nothing", 0, 0))


@pytest.mark.slow
def test_tasks_run_in_other_processes():
    tasks = tasks_of_benchmarks("quantize", None)
    assert set(precompile(tasks, jobs=2)) == set(tasks)

"""Where a denoising loop is: generations, steps and calls, told by a scheduler."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo.integrations.diffusers.denoising import Denoising, StepCounts


class Loop:
    """A scheduler's counters, and what a Denoising makes of calls."""

    def __init__(self):
        self.scheduler = SimpleNamespace(timesteps=None, step_index=None, begin_index=None)
        self.denoising = Denoising(lambda: self.scheduler)

    def set_timesteps(self, num=4):
        self.scheduler.timesteps = list(range(num))
        self.scheduler.step_index = None

    def call(self, moment, step, context="cond", component="transformer"):
        self.scheduler.step_index = step
        return self.denoising.enter(component, context, moment)


@pytest.fixture
def loop():
    loop = Loop()
    loop.set_timesteps()
    return loop


def test_steps_of_one_generation(loop):
    calls = [loop.call(1.0, None), loop.call(0.7, 1), loop.call(0.5, 2), loop.call(0.2, 3)]
    assert {call.generation for call in calls} == {1}
    assert [call.is_last_step for call in calls] == [False, False, False, True]
    assert {call.context for call in calls} == {"cond"}


def test_a_scheduler_that_begins_later_is_at_its_begin_index(loop):
    loop.scheduler.begin_index = 3
    assert loop.call(0.2, None).is_last_step


def test_new_timesteps_begin_a_generation_wherever_the_last_one_stopped(loop):
    first = loop.call(1.0, None)
    loop.set_timesteps()
    again = loop.call(1.0, None)
    assert (again.generation, again.context) == (first.generation + 1, "cond")
    loop.set_timesteps()
    assert loop.call(0.7, None).generation == first.generation + 2
    loop.scheduler.step_index = 0
    loop.set_timesteps()
    assert loop.call(0.5, 1).generation == first.generation + 3


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        (1.0, 2),  # the time goes back
        (0.8, 2),
        (0.7, 0),  # the step goes back
        (0.5, 1),  # the time moves, the step does not: another scheduler's loop
    ],
)
def test_what_is_not_the_next_step_begins_a_generation(loop, moment, step):
    loop.call(1.0, None)
    before = loop.call(0.7, 1)
    assert loop.call(moment, step).generation == before.generation + 1


def test_times_that_rounding_made_equal_are_steps_of_one_generation(loop):
    before = loop.call(1.0, None)
    call = loop.call(1.0, 1)
    assert (call.generation, call.context) == (before.generation, "cond")


def test_calls_without_a_time_go_by_the_scheduler(loop):
    assert [loop.call(None, step).generation for step in (None, 1, 2)] == [1, 1, 1]


def test_a_second_call_of_a_step_has_a_context_of_its_own(loop):
    names = [
        [loop.call(moment, step, "all").context for _ in range(2)]
        for step, moment in enumerate((1.0, 0.7))
    ]
    assert names == [["all", "all 2"]] * 2
    assert loop.call(0.7, 1, "all", component="transformer_2").context == "all"


def test_counts_are_of_the_last_generation(loop):
    first = loop.call(1.0, None)
    loop.denoising.count("transformer", first, is_computed=True)
    loop.denoising.count("transformer", loop.call(0.7, 1), is_computed=False)
    assert loop.denoising.counts == {"transformer": {"cond": StepCounts(1, 1)}}
    assert str(StepCounts(1, 3)) == "3 of 4 steps skipped"
    loop.set_timesteps()
    loop.call(1.0, None)
    assert loop.denoising.counts == {}


def test_after_a_failure_the_next_step_begins_a_generation(loop):
    before = loop.call(1.0, None)
    loop.denoising.forget()
    assert loop.call(0.7, 1).generation == before.generation + 1

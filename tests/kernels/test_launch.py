"""Launches by one function: as Triton's own, and told to whoever listens in the same thread."""

import threading

import pytest

pytest.importorskip("triton")
from triton import knobs

from octavo.kernels.launch import has_hooks, launch
from octavo.kernels.listening import listener, listening


class Kernel:
    """Stands for a kernel of Triton: notes what it is given."""

    arg_names = ("x_ptr", "size", "EVEN")

    def __init__(self, compiled="compiled"):
        self.given, self.compiled = [], compiled

    def __getitem__(self, grid):
        def run(*args, **options):
            self.given.append((grid, args, options))
            return self.compiled

        return run


def test_a_launch_is_tritons():
    kernel = Kernel()
    launch(kernel, (2,), "x", size=3, EVEN=True, num_warps=4)
    assert kernel.given == [((2,), ("x",), {"size": 3, "EVEN": True, "num_warps": 4})]


def test_who_listens_hears_the_arguments_in_the_kernels_order():
    kernel, heard = Kernel(), []
    with listening(heard.append):
        assert listener() is not None
        launch(kernel, (2, 5), "x", EVEN=True, num_warps=4, size=3)
    assert listener() is None
    launch(kernel, (1,), "x", 3, True)
    [told] = heard
    assert told.compiled == "compiled" and told.grid == (2, 5, 1)
    assert told.arguments == ("x", 3, True)


def test_a_launch_that_nothing_was_compiled_for_cannot_be_repeated():
    """The interpreter's, or one that a hook of Triton's prevents."""
    heard = []
    with listening(heard.append):
        launch(Kernel(compiled=None), (1,), "x", 3, True)
    assert heard == [None]


def test_other_threads_are_not_heard():
    heard = []
    with listening(heard.append):
        thread = threading.Thread(target=launch, args=(Kernel(), (1,), "x", 3, True))
        thread.start()
        thread.join()
    assert not heard


def test_who_listens_inside_takes_over_for_a_while():
    first, second = [], []
    with listening(first.append):
        with listening(second.append):
            launch(Kernel(), (1,), "x", 3, True)
        launch(Kernel(), (1,), "x", 3, True)
    assert (len(first), len(second)) == (1, 1)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_triton_are_found(name, monkeypatch):
    """A profiler's: whoever replays launches has to leave them to Triton then."""
    hooks = getattr(knobs.runtime, name)
    assert not has_hooks()
    monkeypatch.setattr(hooks, "calls", [print])
    assert has_hooks()
    monkeypatch.setattr(hooks, "calls", [])
    monkeypatch.setattr(knobs.runtime, name, print)  # one function, not a chain
    assert has_hooks()

"""Launches that Triton looks at once: the same compiled kernel for the same sizes, and no other."""

import pytest
import torch

pytest.importorskip("triton")
from octavo.kernels import launch as module  # noqa: E402
from octavo.kernels.launch import Copied, Fixed, launch  # noqa: E402


class Kernel:
    """Stands for a kernel of Triton: notes what it is given, and what its compiled form is."""

    arg_names = ("x_ptr", "size", "EVEN")

    def __init__(self):
        self.looked, self.launched = [], []

    def __getitem__(self, grid):
        def look(**arguments):
            self.looked.append((grid, arguments))
            return self

        def run(*args, **arguments):
            if arguments:
                return look(**arguments)
            self.launched.append((grid, args))
            return None

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "JITFunction", Kernel)
    monkeypatch.setattr(module, "_KNOWN", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


FIXED = Fixed(EVEN=True, size=3, num_warps=4)


def tensors(x):
    return {"x_ptr": x}


def test_the_second_launch_has_its_own_tensors_in_the_kernels_order(kernel):
    first, second = torch.zeros(8), torch.ones(8)
    launch(kernel, (2,), tensors(first), FIXED)
    launch(kernel, (5,), tensors(second), FIXED)
    [(grid, arguments)] = kernel.looked
    assert grid == (2,) and arguments == {"x_ptr": first, **FIXED}
    [(grid, args)] = kernel.launched
    assert grid == (5, 1, 1)
    assert args[0] is second and args[1:] == (3, True)


@pytest.mark.parametrize(
    ("x", "fixed"),
    [
        (torch.zeros(8), Fixed(FIXED)),  # may be the same: nobody looks
        (torch.zeros(8).half(), FIXED),
        (torch.zeros(9)[1:], FIXED),  # 4 bytes behind what is aligned
        (None, FIXED),
    ],
    ids=["fixed", "dtype", "alignment", "none"],
)
def test_what_may_be_another_kernel_is_looked_at(kernel, x, fixed):
    launch(kernel, (1,), tensors(torch.zeros(8)), FIXED)
    launch(kernel, (1,), tensors(x), fixed)
    assert len(kernel.looked) == 2 and not kernel.launched


def test_other_kernels_and_devices(kernel, monkeypatch):
    other = Kernel()
    for one in (kernel, other):
        launch(one, (1,), tensors(torch.zeros(8)), FIXED)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel, (1,), tensors(torch.zeros(8)), FIXED)
    assert (len(kernel.looked), len(other.looked)) == (2, 1)
    assert not kernel.launched and not other.launched


def test_tensors_that_are_copied_in_tiles(kernel, monkeypatch):
    def copied(x, block):
        return tensors(Copied(x, list(x.shape), list(x.stride()), block, "layout"))

    x, y = torch.zeros(16, 32), torch.ones(16, 32)
    monkeypatch.setattr(module, "TensorDescriptor", lambda *args: ("checked", args[0]))
    launch(kernel, (1,), copied(x, (8, 16)), FIXED)
    word, base = kernel.looked[0][1]["x_ptr"]
    assert word == "checked" and base is x
    launch(kernel, (1,), copied(y, (8, 16)), FIXED)
    assert kernel.launched[0][1][0].base is y
    launch(kernel, (1,), copied(y, (16, 16)), FIXED)
    assert len(kernel.looked) == 2


def test_all_are_forgotten_when_they_are_many(kernel, monkeypatch):
    monkeypatch.setattr(module, "MAX_KNOWN", 3)
    for size in range(4):
        launch(kernel, (1,), tensors(torch.zeros(8)), Fixed(size=size))
    assert len(module._KNOWN) == 1


def test_the_interpreter_is_asked_each_time():
    kernel = Kernel()
    for _ in range(2):
        launch(kernel, (1,), tensors(torch.zeros(8)), FIXED)
    assert len(kernel.looked) == 2

"""Launches that Triton looks at once: the same compiled kernel for the same sizes, and no other."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels import launch as module
from octavo.kernels.launch import Fixed, launch, unchecked_descriptor


class Kernel:
    """Stands for a kernel of Triton: notes what it is given, and what its compiled form is."""

    arg_names = ("x_ptr", "size", "EVEN")

    def __init__(self):
        self.looked, self.launched, self.is_prevented = [], [], False

    def __getitem__(self, grid):
        def look(**arguments):
            self.looked.append((grid, arguments))
            return None if self.is_prevented else self

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


def descriptor(x, *block):
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float16)
    return unchecked_descriptor(x, block, layout)


def test_descriptors_are_tritons_own(kernel):
    """Newer versions of Triton read fields that 3.6 has not: later launches have them too."""
    x, y = torch.zeros(16, 32).half(), torch.ones(16, 32).half()
    launch(kernel, (1,), tensors(descriptor(x, 8, 16)), FIXED)
    launch(kernel, (1,), tensors(descriptor(y, 8, 16)), FIXED)
    first, second = kernel.looked[0][1]["x_ptr"], kernel.launched[0][1][0]
    assert first.base is x and second.base is y
    for given in (first, second):
        made = TensorDescriptor(given.base, [16, 32], [32, 1], [8, 16], given.layout)
        assert type(given) is TensorDescriptor
        assert all(getattr(given, f.name) is not None for f in dataclasses.fields(made))
        others = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)[1:]}
        assert {name: getattr(given, name) for name in others} == others


def test_other_tiles_are_another_kernel(kernel):
    x = torch.zeros(16, 32).half()
    launch(kernel, (1,), tensors(descriptor(x, 8, 16)), FIXED)
    launch(kernel, (1,), tensors(descriptor(x, 16, 16)), FIXED)
    assert len(kernel.looked) == 2 and not kernel.launched


def test_triton_checks_the_descriptors_of_a_first_launch(kernel):
    x = torch.zeros(16, 34).half()[:, :32]  # rows of 68 bytes
    with pytest.raises(AssertionError, match="16-byte aligned"):
        launch(kernel, (1,), tensors(descriptor(x, 8, 16)), FIXED)


def test_a_launch_that_a_hook_prevents_is_not_remembered(kernel):
    kernel.is_prevented = True
    launch(kernel, (1,), tensors(torch.zeros(8)), FIXED)
    assert not module._KNOWN


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

"""What octavo knows about a device."""

import pytest
import torch

from octavo.kernels import device
from octavo.kernels.device import CPU, Device, describe


@pytest.fixture
def two_gpus(monkeypatch):
    """Two cards without a driver: what torch would say, and how often it was asked."""

    class Properties:
        name, major, minor, multi_processor_count, total_memory = "H200", 9, 0, 132, 2**37

    asked = []

    def get_device_properties(index):
        asked.append(index)
        return Properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device._describe_cuda.cache_clear()
    yield asked
    device._describe_cuda.cache_clear()


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu")], ids=str)
def test_a_cpu_has_no_capability(name):
    assert describe(name) == CPU
    assert CPU.capability is None


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_another_device_is_named(name):
    assert describe(name) == Device(type=name, name=name)


def test_a_gpu_is_asked_once(two_gpus):
    expected = Device(type="cuda", name="H200", capability=(9, 0), num_sms=132, memory_bytes=2**37)
    assert [describe("cuda:0") for _ in range(3)] == [expected] * 3
    assert two_gpus == [0]


def test_plain_cuda_is_the_current_gpu(two_gpus):
    describe("cuda")
    assert two_gpus == [1]
    describe(torch.device("cuda", 1))
    assert two_gpus == [1]


def test_a_device_can_be_a_key():
    assert {describe("cpu"): 1}[CPU] == 1


@pytest.mark.gpu
def test_this_gpu():
    found = describe("cuda")
    assert found == describe(torch.zeros(1, device="cuda").device)
    assert found.capability == torch.cuda.get_device_capability()
    assert found.name == torch.cuda.get_device_name()
    assert found.num_sms > 0
    assert found.memory_bytes > 2**30

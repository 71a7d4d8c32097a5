"""What runs on which hardware, as docs/reference/support.md says: devices made up."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from octavo import ops
from octavo.errors import UnsupportedError
from octavo.kernels.device import CPU, Device
from octavo.ops.check import check_fp8_device
from octavo.ops.explain import explain
from octavo.ops.select import OPS, Request, impl_names, select
from octavo.recipe import LinearSettings

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "support.md"
MI300 = Device(type="cuda", name="AMD Instinct MI300X", capability=(9, 4), num_sms=304)
GPUS = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0)}


@pytest.fixture
def rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(import_module("octavo.ops.check"), "describe", lambda device: MI300)


@pytest.mark.parametrize("op", OPS)
def test_kernels_for_nvidia_do_not_run_by_rocm(rocm, op):
    request = Request(op=op, device=MI300, dtype=torch.bfloat16, head_dim=128)
    assert select(request).impl == "reference"
    for impl in impl_names(op)[:-1]:
        with pytest.raises(UnsupportedError, match="for NVIDIA GPUs, got AMD Instinct MI300X"):
            select(request, impl)


def test_a_third_party_may_serve_rocm(rocm):
    ops.register_impl("quantize", "aiter", lambda *args, **options: None, is_automatic=True)
    try:
        request = Request(op="quantize", device=MI300, dtype=torch.bfloat16)
        assert select(request).impl == "aiter"
    finally:
        ops.unregister_impl("quantize", "aiter")


def test_fp8_layers_raise_by_rocm(rocm):
    with pytest.raises(UnsupportedError, match="x: expected an NVIDIA GPU or a CPU, got AMD"):
        check_fp8_device("x", torch.device("cuda"), None)
    check_fp8_device("x", torch.device("cuda"), "reference")  # asked for by name


def test_a_cpu_is_a_cpu_by_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    check_fp8_device("x", torch.device("cpu"), None)
    ops.quantize(torch.ones(4, 4))


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_fp8_layers_raise_on_other_accelerators(kind):
    with pytest.raises(UnsupportedError, match=f"expected an NVIDIA GPU or a CPU, got {kind}"):
        check_fp8_device("x", torch.device(kind), None)
    check_fp8_device("x", torch.device("meta"), None)


def test_the_page_names_what_runs_each_op():
    """The table of docs/reference/support.md against what `octavo doctor` would say."""
    lines = re.findall(r"^\| `(\w+)`, (.+?) \| (.*) \|$", DOCS.read_text(), flags=re.MULTILINE)
    said = {(op, kind): [cell.strip() for cell in cells.split("|")] for op, kind, cells in lines}
    expected = {}
    for device in [
        CPU,
        *(Device(type="cuda", name=n, capability=c, num_sms=100) for n, c in GPUS.items()),
    ]:
        for found in explain(device):
            assert found.selection is not None
            impl = f"`{found.selection.impl}`"
            expected.setdefault((found.op, found.operands), []).append(impl)
    assert said == expected


def test_weights_alone_are_what_sm_80_can_do(monkeypatch):
    """An FP8 weight beside plain activations is no FP8 product."""
    a100 = Device(type="cuda", name="A100", capability=(8, 0), num_sms=108)
    monkeypatch.setattr(import_module("octavo.ops.check"), "describe", lambda device: a100)
    with pytest.raises(UnsupportedError, match=r"sm_89 or newer\), got A100 \(sm_80\)"):
        check_fp8_device("x", torch.device("cuda"), None)
    assert LinearSettings(activation=None).activation is None
    request = Request(
        op="scaled_mm", device=a100, dtype=torch.bfloat16, other_dtype=torch.float8_e4m3fn
    )
    assert select(request).impl == "triton"

"""explain: what would run where, for every op, without running anything."""

import pytest
import torch

from octavo import ops
from octavo.kernels.device import CPU, Device
from octavo.ops.select import _IMPLS, OPS, Request

H200 = Device(type="cuda", name="H200", capability=(9, 0), num_sms=132)


@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.name)
def test_every_op_is_explained(device):
    rows = ops.explain(device)
    assert {row.op for row in rows} == set(OPS)
    assert len({(row.op, row.operands) for row in rows}) == len(rows)
    for row in rows:
        assert row.selection.impl in [impl.name for impl in _IMPLS[row.op]]
        assert row.reason == row.selection.reason


def test_the_kinds_are_calls_that_an_op_takes():
    kinds = {}
    for row in ops.explain(CPU):
        kinds.setdefault(row.op, set()).add(row.operands)
    assert kinds["decode_attention"] == kinds["append_kv"] == {"BF16", "BF16 to FP8"}
    assert kinds["attention"] == {"BF16", "FP8"}
    assert kinds["rotate_qk"] == kinds["matvec"] == kinds["linear_gelu"] == {"BF16"}
    assert kinds["quantize"] == kinds["quantize_qkv"] == {"BF16 to FP8"}


def test_hopper_has_kernels_of_its_own():
    impls = {(row.op, row.operands): row.selection.impl for row in ops.explain(H200)}
    assert impls["attention", "FP8"] == impls["prefill_attention", "FP8"] == "gluon"
    assert impls["decode_attention", "BF16 to FP8"] == "gluon"
    assert impls["attention", "BF16"] == "triton"


def test_when_nothing_can_run_the_reason_is_told(monkeypatch):
    seen: list[Request] = []

    def refuse(request: Request) -> str:
        seen.append(request)
        return "head_dim is odd"

    monkeypatch.setitem(_IMPLS, "quantize", [])
    ops.register_impl("quantize", "picky", print, objection=refuse, is_automatic=True)
    (row,) = [row for row in ops.explain(H200, head_dim=71) if row.op == "quantize"]
    assert row.selection is None
    assert row.reason == "no implementation of quantize can run this: picky: head_dim is odd"
    assert seen[0].head_dim == 71
    assert (seen[0].dtype, seen[0].other_dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    assert seen[0].device == H200

"""Fuzzing attention: what it compares with is right, and what is wrong is found."""

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_attention.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fuzz_attention", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def small(shape):
    lens = {
        name: tuple(n % 150 for n in getattr(shape, name)[:4]) for name in ("q_lens", "kv_lens")
    }
    return replace(shape, **lens, window=1 + shape.window % 60)


def test_the_reference_passes_in_all_kinds(script):
    source = random.Random(3)
    for kind in script.KINDS:
        shape = small(script.draw_shape(kind, source))
        error = script.launch(kind, shape, "reference", "cpu")
        # In float32, exact apart from P: the reference rounds it as the kernel does.
        assert error[0] <= script.MAX_ERROR and error[1] <= script.MAX_LSE_ERROR
        assert error[2] == 0


@pytest.mark.parametrize("wrong", ["out", "lse", "nan"])
def test_a_wrong_result_is_found(script, monkeypatch, wrong):
    attend = script.attend

    def worse(x, impl):
        out, lse = attend(x, impl)
        if wrong == "nan":
            out.view(-1)[-1] = float("nan")
        return (out * 1.1 if wrong == "out" else out), (lse + 0.2 if wrong == "lse" else lse)

    monkeypatch.setattr(script, "attend", worse)
    shape = script.Shape((70,), (90,), 2, 1, 50, True)
    error = script.launch(script.KINDS[0], shape, "reference", "cpu")
    limits = (script.MAX_ERROR, script.MAX_LSE_ERROR, 0)
    assert [not e <= limit for e, limit in zip(error.tolist(), limits, strict=True)] == {
        "out": [True, False, False],
        "lse": [False, True, False],
        "nan": [True, False, True],
    }[wrong]
    assert torch.isfinite(error[1])

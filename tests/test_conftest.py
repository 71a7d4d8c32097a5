"""conftest.py keeps its promises, and shows it when a test would break them."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

pytest_plugins = "pytester"

CONFTEST = Path(__file__).with_name("conftest.py").read_text()
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: torch.empty(3, dtype=dtype),
        lambda dtype: torch.empty_like(torch.zeros(3, dtype=dtype)),
        lambda dtype: torch.zeros(3, dtype=dtype).new_empty(5),
        lambda dtype: torch.empty_strided((2, 2), (2, 1), dtype=dtype),
    ],
    ids=["empty", "empty_like", "new_empty", "empty_strided"],
)
def test_uninitialized_memory_is_nan(make, dtype):
    assert make(dtype).float().isnan().all()


def test_uninitialized_integers_are_far_out_of_range():
    assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2


@pytest.mark.parametrize("attempt", [1, 2])
def test_every_test_starts_from_the_same_seed(attempt):
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    assert drawn == pytest.approx((0.8444218515250481, 0.5488135039273248, 0.49625658988952637))


def test_the_callers_environment_does_not_reach_a_test(pytester, monkeypatch):
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("import os\ndef test_it(): assert 'OCTAVO_DEBUG' not in os.environ")
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider").ret == 0
    assert os.environ["OCTAVO_DEBUG"] == "1"


@pytest.mark.parametrize(("has_gpu", "outcome"), [(False, "skipped"), (True, "passed")])
def test_gpu_tests_run_only_with_a_gpu(pytester, monkeypatch, has_gpu, outcome):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers = gpu: needs a CUDA GPU")
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_it(): pass")
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(**{outcome: 1})
    assert ("needs a CUDA GPU" in result.stdout.str()) is not has_gpu


def test_a_gpu_run_imports_only_files_with_gpu_tests(pytester, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n  gpu: needs a CUDA GPU\n  slow: takes long")
    pytester.makepyfile(
        test_device="import pytest\n@pytest.mark.gpu\ndef test_it(): pass",
        test_host="import a_package_that_is_not_there",
    )
    run = pytester.runpytest_inprocess
    for expression in ("gpu", "gpu and not slow"):
        run("-m", expression, "-p", "no:cacheprovider").assert_outcomes(passed=1)
    run("-p", "no:cacheprovider").assert_outcomes(errors=1)


def test_torchs_warning_about_determinism_is_not_an_error(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nfilterwarnings = error")
    warning = "put_ does not have a deterministic implementation, but you set ..."
    pytester.makepyfile(f"import warnings\ndef test_it(): warnings.warn({warning!r})")
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider").ret == 0


@pytest.mark.slow  # each starts a pytest of its own
@pytest.mark.parametrize(("mark", "num_errors"), [("default", 0), ("ignore", 0), ("error", 1)])
def test_what_a_tolerant_test_leaves_open_fails_no_other(pytester, mark, num_errors):
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nfilterwarnings = error")
    pytester.makepyfile(
        f"""
        import asyncio, gc, socket, pytest

        @pytest.mark.filterwarnings("{mark}")
        def test_a_leak():
            leak = [socket.socket()]
            leak.append(leak)
            asyncio.set_event_loop(asyncio.new_event_loop())

        def test_another():
            asyncio.run(asyncio.sleep(0))
            gc.collect()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(
        passed=2 - num_errors, failed=num_errors, warnings=2 * (mark == "default")
    )

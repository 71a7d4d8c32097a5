"""What every test gets: fixed seeds, NaN in fresh memory, a clean environment, the gpu marker."""

import asyncio
import gc
import os
import random
import sys

import numpy as np
import pytest
import torch
import torch.utils.deterministic

from octavo.numerics.narrow_products import use_float32_products

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may have only torch and pytest
    settings = None

SEED = 0
# Filters of tests in which warnings of other libraries are not ours to mend.
TOLERANT = ("default", "ignore")

# cuBLAS asks for a fixed workspace when torch is deterministic; it is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Names on the hub are not asked for: without a network each takes minutes of retries.
os.environ["HF_HUB_OFFLINE"] = "1"

if settings is not None:
    settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
    settings.register_profile("slow", deadline=None, derandomize=True, max_examples=1000)
    settings.load_profile("ci")  # another one: pytest --hypothesis-profile=slow


use_float32_products()  # else tests of BF16 models take hours on some ARM CPUs


def pytest_configure(config):
    # Warnings are errors here, and torch warns about operations that are not deterministic;
    # determinism is not what we ask for, only the filled memory that comes with it.
    config.addinivalue_line("filterwarnings", "ignore:.*deterministic:UserWarning")
    # torch says so once on such CPUs.
    config.addinivalue_line("filterwarnings", "ignore:mkldnn_matmul failed:UserWarning")
    # Workers that each take all cores wait for one another most of the time.
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config):
    # A GPU machine has torch but not every package that the other tests import.
    expression = config.getoption("markexpr").split(" and ")
    only_gpu = "gpu" in expression and collection_path.suffix == ".py"
    return True if only_gpu and "mark.gpu" not in collection_path.read_text() else None


def pytest_collection_modifyitems(items):
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def seeds():
    """Every test starts from the same random state."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """torch.empty and its relatives hold NaN (integers: their maximum): a forgotten write shows."""
    before = torch.get_deterministic_debug_mode()
    # use_deterministic_algorithms would import inductor (2.6 s) and change its settings too.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture(autouse=True)
def nothing_to_tell():
    """No test is warned of what saturated in another one."""
    yield
    if (saturation := sys.modules.get("octavo.layers.saturation")) is not None:
        saturation.WATCH.forget()


@pytest.fixture(autouse=True)
def tolerated_to_the_end(request):
    """What a test that tolerates warnings leaves behind is collected while they are tolerated.

    Otherwise an unclosed socket of another library fails a strict test later, at random. A loop
    that a library has made the thread's own (litellm does) would stay until asyncio.run drops it.
    """
    yield
    marks = request.node.iter_markers("filterwarnings")
    if any(action in TOLERANT for mark in marks for action in mark.args):
        asyncio.set_event_loop(None)
        gc.collect()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No OCTAVO_* variable of the caller reaches a test."""
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)

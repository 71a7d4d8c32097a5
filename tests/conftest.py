"""What every test gets: fixed seeds, NaN in fresh memory, a clean environment, the gpu marker."""

import os
import platform
import random
import warnings

import numpy as np
import pytest
import torch
import torch.utils.deterministic

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may have only torch and pytest
    settings = None

SEED = 0

# cuBLAS asks for a fixed workspace when torch is deterministic; it is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if settings is not None:
    settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
    settings.register_profile("slow", deadline=None, derandomize=True, max_examples=1000)
    settings.load_profile("ci")  # another one: pytest --hypothesis-profile=slow


# Products that torch computes one value at a time where the CPU has no BF16 instructions.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")
NARROW = (torch.bfloat16, torch.float16)


def is_narrow(x):
    return isinstance(x, torch.Tensor) and x.dtype in NARROW


def widened(x):
    return x.float() if is_narrow(x) else x


def compute_in_float32(library, name):
    """Have torch compute 16-bit products in float32 and round the result."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def call(keys, *args, **options):
        narrow = next((x for x in args if is_narrow(x)), None)
        if narrow is None:
            return kernel.call_boxed(keys, *args, **options)
        options = {name: widened(x) for name, x in options.items()}
        result = kernel.call_boxed(keys, *map(widened, args), **options)
        if isinstance(result, tuple):  # attention's, and its logarithms in float32
            return result[0].to(narrow.dtype), *result[1:]
        return result.to(narrow.dtype)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel of torch's is replaced
        library.impl(name, call, "CPU", with_keyset=True, allow_override=True)


if platform.machine() == "aarch64" and not torch.cpu.get_capabilities()["bf16"]:
    # Else BF16 takes 80 times as long as float32 (Neoverse N1, torch 2.13): hours for all tests.
    FLOAT32_PRODUCTS = torch.library.Library("aten", "IMPL")
    for product in PRODUCTS:
        compute_in_float32(FLOAT32_PRODUCTS, product)


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
def clean_environment(monkeypatch):
    """No OCTAVO_* variable of the caller reaches a test."""
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)

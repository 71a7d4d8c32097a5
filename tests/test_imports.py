"""Importing octavo in a fresh process: no GPU, no optional package, torch only when needed."""

import re
import subprocess
import sys

import pytest

OPTIONAL = ["triton", "transformers", "diffusers", "vllm", "fastapi", "uvicorn"]
OPTIONAL += ["prometheus_client", "plotly", "jinja2"]
OPTIONAL += ["typer", "rich", "gguf", "datasets", "PIL", "llguidance"]
WITHOUT_TORCH = [
    "octavo",
    "octavo.env",
    "octavo.errors",
    "octavo.internals",
    "octavo.version",
    "octavo.atomic",
    "octavo.recipe",
    "octavo.patterns",
    "octavo.amounts",
    "octavo.calibration.scale_file",
    "octavo.calibration.settings",
    "octavo.integrations.transformers.encoder_options",
    "octavo.integrations.transformers.tokenizer",
    "octavo.serving.engine.image_request",
    "octavo.serving.engine.request",
    "octavo.serving.engine.scheduler",
    "octavo.serving.engine.settings",
    "octavo.serving.server.settings",
    "octavo.measure.records",
    "octavo.measure.rows",
    "octavo.measure.run",
    "octavo.measure.store",
    "octavo.measure.advise.gpus",
    "octavo.measure.advise.shape",
    "octavo.measure.bench.cases",
    "octavo.measure.bench.requests",
    "octavo.measure.report.tables",
    "octavo.measure.report.plots",
    "octavo.measure.report.html",
    "octavo.measure.report.pages",
]
MAX_IMPORT_S = 1.5

BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""

NO_CUDA = """
import torch

def refuse(*args, **kwargs):
    raise AssertionError("the GPU was touched")

for name in ("init", "_lazy_init", "is_available", "device_count", "current_device",
             "get_device_capability", "get_device_properties", "get_device_name", "synchronize"):
    assert hasattr(torch.cuda, name), name
    setattr(torch.cuda, name, refuse)
"""

ALL_PUBLIC_NAMES = """
import octavo
for name in octavo.__all__:
    if name not in NEEDS:
        getattr(octavo, name)
"""
# Names whose file has classes that extend one of an optional package, or that need it for all.
NEEDS = {
    "OctavoConfig": "transformers",
    "Omni": "diffusers",
    "Sensitivity": "diffusers",
    "calibrate_pipeline": "diffusers",
    "count_cached_steps": "diffusers",
    "drop_step_cache_": "diffusers",
    "fit_tea_cache": "diffusers",
    "scan_sensitivity": "diffusers",
    "use_step_cache_": "diffusers",
}

GPU_IS_REFUSED = """
try:
    torch.zeros(1, device="cuda")
except AssertionError as error:
    assert "the GPU was touched" in str(error)
else:
    raise AssertionError("nothing would have noticed a touch of the GPU")
"""

REFERENCE_CALL = """
from octavo.numerics.quantize import quantize
x = torch.linspace(-1, 1, 64).view(4, 16)
assert (quantize(x).dequantize() - x).abs().max() < 0.05
"""


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120
    )


def blocking(packages: list[str], code: str) -> str:
    constants = f"BLOCKED = {set(packages)!r}\nNEEDS = {NEEDS!r}"
    return f"{constants}\n{BLOCK}\n{code}"


def import_seconds(report: str, package: str) -> float:
    """The time that -X importtime gives to a package and all it imported; 0 if it was not."""
    found = re.search(rf"\|\s*(\d+) \|\s*{package}$", report, flags=re.MULTILINE)
    return int(found[1]) / 1e6 if found else 0.0


def test_public_names_and_a_reference_call_need_no_gpu_and_no_optional_package():
    done = python(blocking(OPTIONAL, NO_CUDA + ALL_PUBLIC_NAMES + REFERENCE_CALL + GPU_IS_REFUSED))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_names_that_need_a_package_say_so():
    code = """
import octavo
for name, package in NEEDS.items():
    try:
        getattr(octavo, name)
    except ImportError as error:
        expected = f"octavo.{name} needs {package}, which is not installed: pip install "
        assert str(error).startswith(expected), error
        assert f"[{package}]'" in str(error), error
    else:
        raise AssertionError(f"{name} needs nothing")
"""
    done = python(blocking(OPTIONAL, code))
    assert done.returncode == 0, done.stderr


def test_some_modules_need_no_torch():
    code = "\n".join(f"import {module}" for module in WITHOUT_TORCH)
    done = python(blocking(["torch", *OPTIONAL], code))
    assert done.returncode == 0, done.stderr


def test_import_is_quick_and_loads_no_optional_package():
    code = f"import sys, octavo; print({set(OPTIONAL)!r} & set(sys.modules) or 'none')"
    done = python(code, "-X", "importtime")
    assert done.stdout == "none\n"
    seconds = import_seconds(done.stderr, "octavo") - import_seconds(done.stderr, "torch")
    assert 0 < seconds < MAX_IMPORT_S


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import triton", "triton is blocked"),
        ("import transformers.models", "transformers is blocked"),
        ("def f():\n    from plotly.offline import get_plotlyjs\nf()", "plotly is blocked"),
    ],
    ids=["triton", "submodule", "in a function"],
)
def test_planted_failure_fails(code, message):
    done = python(blocking(OPTIONAL, code))
    assert done.returncode == 1
    assert message in done.stderr


def test_import_seconds_reads_the_report():
    report = (
        "import time: self [us] | cumulative | imported package\n"
        "import time:      1000 |      20000 |   torch._C\n"
        "import time:       500 |    1500000 | torch\n"
        "import time:       500 |    1700000 | octavo\n"
    )
    assert import_seconds(report, "octavo") == 1.7
    assert import_seconds(report, "torch") == 1.5
    assert import_seconds(report, "triton") == 0.0

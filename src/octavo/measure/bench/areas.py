"""Areas beside the kernels that have GPU tests, and which code of theirs the tests saw.

As for kernels, a record carries a hash of the code: an area that changed after its last record has
not been tested where it runs. Comments, docstrings and blank lines do not count. Kernels have
records of their own (`gate`).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.measure.bench.gate import without_comments
from octavo.measure.records import Machine, Measurement

SOURCES = Path(__file__).parents[2]
# What marks a test that needs a GPU.
MARK = "mark.gpu"


@dataclass(frozen=True, kw_only=True)
class Area:
    """Patterns of files: sources under src/octavo, without some that touch no device, and tests."""

    sources: tuple[str, ...]
    without: tuple[str, ...] = ()
    tests: tuple[str, ...]


AREAS = {
    "vision": Area(
        sources=(
            "layers/encoder_attention.py",
            "layers/scaling.py",
            "integrations/transformers/*vision*.py",
        ),
        without=("integrations/transformers/vision_language.py",),
        tests=(
            "integrations/transformers/test_*vision*.py",
            "integrations/transformers/test_peaked_attention.py",
        ),
    ),
    "kv": Area(
        sources=(
            "cache/storage.py",
            "cache/view.py",
            "layers/decoder_attention.py",
            "integrations/transformers/*cache*.py",
            "integrations/transformers/decoder*.py",
            "integrations/transformers/observe_text.py",
            "integrations/transformers/paged_steps.py",
            "integrations/transformers/saturation.py",
        ),
        tests=(
            "cache/test_storage.py",
            "integrations/transformers/test_calibrate_text.py",
            "integrations/transformers/test_kv_cache*.py",
        ),
    ),
    "linear": Area(
        sources=(
            "layers/joint_linear.py",
            "layers/linear.py",
            "layers/saturation.py",
            "layers/warmup.py",
            "integrations/linear.py",
            "integrations/output_heads.py",
            "integrations/transformers/load_fp8.py",
            "integrations/transformers/quantizer.py",
        ),
        tests=(
            "layers/test_joint_linear.py",
            "layers/test_linear_gpu.py",
            "layers/test_warmup.py",
            "integrations/transformers/test_load_fp8.py",
            "integrations/transformers/test_quantizer.py",
        ),
    ),
    "diffusion": Area(
        sources=(
            "integrations/diffusers/attention*.py",
            "integrations/diffusers/calibrate.py",
            "integrations/diffusers/current_layer.py",
            "integrations/diffusers/fused_attention.py",
            "integrations/diffusers/pipeline.py",
            "integrations/diffusers/plain_layers.py",
            "integrations/diffusers/replay.py",
            "integrations/diffusers/step_graphs.py",
            "integrations/diffusers/two_streams.py",
        ),
        tests=(
            "integrations/diffusers/test_attention.py",
            "integrations/diffusers/test_calibrate.py",
            "integrations/diffusers/test_fused_attention.py",
            "integrations/diffusers/test_plain_layers.py",
            "integrations/diffusers/test_step_graphs.py",
        ),
    ),
    "retrieval": Area(
        sources=(
            "integrations/transformers/retrieval_model.py",
            "measure/evaluate/answering.py",
        ),
        tests=("integrations/transformers/test_retrieval_model.py",),
    ),
    "engine": Area(
        sources=(
            "integrations/transformers/engine_*.py",
            "layers/one_token_linear.py",
            "serving/engine/*.py",
        ),
        without=("serving/engine/__init__.py", "serving/engine/llm.py", "serving/engine/text.py"),
        tests=("serving/engine/test_*.py",),
    ),
}


def sources_of(area: str) -> list[Path]:
    """The files whose code an area's record is about."""
    chosen = _area(area)
    return sorted(_matching(SOURCES, chosen.sources) - _matching(SOURCES, chosen.without))


def tests_of(area: str, folder: Path) -> list[Path]:
    """The test files under `folder` that have GPU tests of an area."""
    files = _matching(folder, _area(area).tests)
    return sorted(path for path in files if MARK in path.read_text())


def code_hash(area: str) -> str:
    """The hash of an area's code."""
    digest = hashlib.sha256()
    for path in sources_of(area):
        digest.update(f"{path.relative_to(SOURCES).as_posix()}\n".encode())
        digest.update(without_comments(path.read_text()).encode())
    return digest.hexdigest()[:16]


def passed_record(area: str, num_passed: int, machine: Machine, command: str) -> Measurement:
    """The record of an area's GPU tests that all passed."""
    return Measurement(
        op="gpu_tests",
        impl="all",
        case={"area": area, "code": code_hash(area)},
        values={"num_passed": num_passed},
        machine=machine,
        command=command,
    )


def untested(area: str, records: list[Measurement]) -> str | None:
    """Why an area's present code has not been tested on a GPU; None if it has.

    "no record" if it never was.
    """
    tested = {record.case["code"] for record in records if record.case.get("area") == area}
    if not tested:
        return f"no record of {area}: run `scripts/test_on_gpu.py {area}` on a GPU"
    if code_hash(area) not in tested:
        return f"{area} changed after its last GPU test: run `scripts/test_on_gpu.py {area}`"
    return None


def _area(name: str) -> Area:
    if name not in AREAS:
        raise ConfigError(f"expected an area, one of {', '.join(AREAS)}; got {name!r}")
    return AREAS[name]


def _matching(folder: Path, patterns: tuple[str, ...]) -> set[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        files = set(folder.glob(pattern))
        if not files:
            raise ConfigError(f"expected files that match {pattern} in {folder}, got none")
        found |= files
    return found

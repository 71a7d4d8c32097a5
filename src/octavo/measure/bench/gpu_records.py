"""Records of tests on a GPU, and which code they saw: of each kernel, and of areas beside them.

A record carries a hash of the code. A kernel or an area that changed after its last record has not
been tested where it runs. Comments, docstrings and blank lines do not count.
"""

import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.measure.records import Machine, Measurement

SOURCES = Path(__file__).parents[2]
KERNELS = SOURCES / "kernels"
# What marks a test that needs a GPU.
MARK = "mark.gpu"


@dataclass(frozen=True, kw_only=True)
class Area:
    """Patterns of files: sources under src/octavo, without some that touch no device, and tests."""

    sources: tuple[str, ...]
    without: tuple[str, ...] = ()
    tests: tuple[str, ...]


def _files(folder: str, names: str) -> tuple[str, ...]:
    """The Python files of these names or patterns in a folder."""
    return tuple(f"{folder}/{name}.py" for name in names.split())


_TRANSFORMERS, _DIFFUSERS = "integrations/transformers", "integrations/diffusers"
AREAS = {
    "vision": Area(
        sources=(
            *_files("layers", "encoder_attention scaling"),
            *_files(_TRANSFORMERS, "*vision* fused_forward"),
        ),
        without=_files(_TRANSFORMERS, "vision_language"),
        tests=_files(_TRANSFORMERS, "test_*vision* test_peaked_attention"),
    ),
    "kv": Area(
        sources=(
            *_files("cache", "storage view"),
            *_files("layers", "decoder_attention"),
            *_files(
                _TRANSFORMERS,
                "*cache* decoder* calibrate fused_decoder fused_forward paged_steps saturation",
            ),
        ),
        tests=(
            *_files("cache", "test_storage"),
            *_files(_TRANSFORMERS, "test_calibrate_text test_kv_cache*"),
        ),
    ),
    "linear": Area(
        sources=(
            *_files("layers", "joint_linear linear saturation warmup"),
            *_files("integrations", "linear output_heads"),
            *_files(_TRANSFORMERS, "joint_projections load quantizer"),
        ),
        tests=(
            *_files("layers", "test_joint_linear test_linear_gpu test_warmup"),
            *_files(_TRANSFORMERS, "test_load_fp8 test_quantizer"),
        ),
    ),
    "diffusion": Area(
        sources=_files(
            _DIFFUSERS, "attention calibrate linear pipeline processors sensitivity step_graphs"
        ),
        tests=_files(
            _DIFFUSERS,
            "test_attention test_calibrate test_fused_attention test_plain_layers test_step_graphs",
        ),
    ),
    "retrieval": Area(
        sources=("demo/retrieval_model.py", "measure/evaluate/answering.py"),
        tests=("demo/test_retrieval_model.py",),
    ),
    "engine": Area(
        sources=(*_files(_TRANSFORMERS, "engine_*"), *_files("serving/engine", "*")),
        without=_files("serving/engine", "__init__ llm text"),
        tests=_files("serving/engine", "test_*"),
    ),
}


def kernel_names() -> list[str]:
    """The ops that have kernels of their own, as folders of octavo.kernels."""
    return sorted(path.parent.name for path in KERNELS.glob("*/config.py"))


def tests_of(name: str, tests: Path) -> list[Path]:
    """The files in the folder of all tests that run a kernel, or have GPU tests of an area.

    Those of a kernel are test_<kernel>.py and test_<kernel>_*.py, of the longest name that fits;
    files that only compile are not among them.
    """
    if name in AREAS:
        files = _matching(tests, AREAS[name].tests)
        return sorted(path for path in files if MARK in path.read_text())

    def owner(path: Path) -> str:
        topic = path.stem.removeprefix("test_") + "_"
        return max((name for name in kernel_names() if topic.startswith(name + "_")), default="")

    files = {path for path in (tests / "kernels").glob("test_*.py") if owner(path) == name}
    return sorted(path for path in files if not path.stem.endswith("_compiled"))


def sources_of(name: str) -> list[Path]:
    """The files whose code the record of a kernel or an area is about.

    A kernel's are its own, and those of octavo.kernels that they import, directly or not.
    """
    if name in AREAS:
        area = AREAS[name]
        return sorted(_matching(SOURCES, area.sources) - _matching(SOURCES, area.without))
    waiting = list((KERNELS / name).glob("*.py"))
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for module in re.findall(
            r"^\s*from octavo\.kernels\.([\w.]+) import", path.read_text(), re.M
        ):
            waiting.append(KERNELS / (module.replace(".", "/") + ".py"))
    return sorted(found)


def code_hash(name: str) -> str:
    """The hash of the code of a kernel or an area, and of the tuned settings of kernels."""
    if name not in (known := [*kernel_names(), *AREAS]):
        raise ConfigError(f"expected a kernel or an area, one of {', '.join(known)}; got {name!r}")
    root = SOURCES if name in AREAS else KERNELS
    digest = hashlib.sha256()
    files = sources_of(name)
    for path in files:
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(without_comments(path.read_text()).encode())
    used = {path.parent.name for path in files}
    for path in sorted(KERNELS.glob("tuned/*.json")) if root is KERNELS else ():
        settings = {op: rows for op, rows in json.loads(path.read_text()).items() if op in used}
        if settings:
            digest.update(f"{path.name}\n{json.dumps(settings, sort_keys=True)}".encode())
    return digest.hexdigest()[:16]


def without_comments(source: str) -> str:
    """Python source with its comments, docstrings and blank lines taken out."""
    lines = source.splitlines()
    before = tokenize.NEWLINE  # what a statement begins after
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token, after in zip(tokens, tokens[1:], strict=False):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
        is_statement = before in _ENDS and after.type == tokenize.NEWLINE
        if token.type == tokenize.STRING and is_statement:
            lines[row - 1] = lines[row - 1][:column]
            lines[row : token.end[0]] = [""] * (token.end[0] - row)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return "\n".join(line.rstrip() for line in lines if line.strip())


_ENDS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def passed_record(name: str, num_passed: int, machine: Machine, command: str) -> Measurement:
    """The record of GPU tests that all passed."""
    return Measurement(
        op="gpu_tests",
        impl="all",
        case={_kind(name): name, "code": code_hash(name)},
        values={"num_passed": num_passed},
        machine=machine,
        command=command,
    )


def untested(name: str, records: Iterable[Measurement]) -> str | None:
    """Why the present code of a kernel or an area has not been tested on a GPU; None if it has.

    "no record" if it never was.
    """
    kind = _kind(name)
    tested = {record.case["code"] for record in records if record.case.get(kind) == name}
    if code_hash(name) in tested:
        return None
    why = f"{name} changed after its last GPU test" if tested else f"no record of {name}"
    return f"{why}: run `scripts/test_on_gpu.py {name}` on a GPU"


def _kind(name: str) -> str:
    return "area" if name in AREAS else "kernel"


def _matching(folder: Path, patterns: tuple[str, ...]) -> set[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        files = set(folder.glob(pattern))
        if not files:
            raise ConfigError(f"expected files that match {pattern} in {folder}, got none")
        found |= files
    return found

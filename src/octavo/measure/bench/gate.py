"""Which code a GPU test saw: a record of it carries the hash of the kernel's code.

A kernel that changed after its last record has not been tested where it runs. Comments, docstrings
and blank lines do not count.
"""

import hashlib
import io
import json
import re
import tokenize
from pathlib import Path

from octavo.errors import ConfigError
from octavo.measure.records import Machine, Measurement

KERNELS = Path(__file__).parents[2] / "kernels"


def kernel_names() -> list[str]:
    """The ops that have kernels of their own, as folders of octavo.kernels."""
    return sorted(path.parent.name for path in KERNELS.glob("*/config.py"))


def tests_of(kernel: str, folder: Path) -> list[Path]:
    """The test files in `folder` that run a kernel: test_<kernel>.py and test_<kernel>_*.py.

    A file belongs to the longest name that fits: test_quantize_qkv.py is not quantize's. Files that
    only compile are not among them.
    """

    def owner(path: Path) -> str:
        topic = path.stem.removeprefix("test_") + "_"
        return max((name for name in kernel_names() if topic.startswith(name + "_")), default="")

    files = [path for path in folder.glob("test_*.py") if owner(path) == kernel]
    return sorted(path for path in files if not path.stem.endswith("_compiled"))


def code_hash(kernel: str) -> str:
    """The hash of a kernel's code, of the kernels it uses in turn, and of their tuned settings."""
    if kernel not in kernel_names():
        expected = ", ".join(kernel_names())
        raise ConfigError(f"expected a kernel, one of {expected}; got {kernel!r}")
    digest = hashlib.sha256()
    files = sorted(_files_behind(kernel))
    for path in files:
        digest.update(f"{path.relative_to(KERNELS)}\n".encode())
        digest.update(without_comments(path.read_text()).encode())
    used = {path.parent.name for path in files}
    for path in sorted(KERNELS.glob("tuned/*.json")):
        settings = {op: rows for op, rows in json.loads(path.read_text()).items() if op in used}
        if settings:
            digest.update(f"{path.name}\n{json.dumps(settings, sort_keys=True)}".encode())
    return digest.hexdigest()[:16]


def _files_behind(kernel: str) -> set[Path]:
    """A kernel's own files, and those of octavo.kernels that they import, directly or not."""
    waiting = list((KERNELS / kernel).glob("*.py"))
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
    return found


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


def passed_record(kernel: str, num_passed: int, machine: Machine, command: str) -> Measurement:
    """The record of GPU tests that all passed."""
    return Measurement(
        op="gpu_tests",
        impl="all",
        case={"kernel": kernel, "code": code_hash(kernel)},
        values={"num_passed": num_passed},
        machine=machine,
        command=command,
    )


def untested(records: list[Measurement]) -> dict[str, str]:
    """Kernels without a record of their present code, and why."""
    tested = {
        (record.case["kernel"], record.case["code"])
        for record in records
        if "kernel" in record.case
    }
    known = {kernel for kernel, _ in tested}
    missing = {}
    for kernel in kernel_names():
        if (kernel, code_hash(kernel)) not in tested:
            changed = "changed after its last GPU test" if kernel in known else "never tested"
            missing[kernel] = f"{changed}: run `make test-gpu` on a GPU"
    return missing

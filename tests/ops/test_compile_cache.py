"""What is compiled lies in OCTAVO_CACHE_DIR, and another process finds it there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

POINTERS = ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr")
REQUEST = {
    "capability": 90,
    "kernel": "octavo.kernels.matvec.triton:_matvec_kernel",
    "signature": dict.fromkeys(POINTERS, "*bf16")
    | dict.fromkeys(("num_columns", "depth", "row_stride"), "i32"),
    "constants": {
        "ALIGN": 8,
        "IS_EVEN": True,
        "BLOCK_N": 4,
        "BLOCK_K": 2048,
        "HAS_BIAS": True,
        "IS_DEPENDENT": True,
    },
    "aligned": list(POINTERS),
    "options": {"num_warps": 4, "num_stages": 1},
}
CODE = """
import json, sys
import octavo.ops                      # as whoever uses octavo imports it
from octavo_testkit.kernels.compiling import _compile
_compile(**json.loads(sys.argv[1]))
"""


def compile_in_another_process(cache, home):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_INTERPRET": "0", "HOME": str(home)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if cache is not None:
        environment["OCTAVO_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-c", CODE, json.dumps(REQUEST)]
    subprocess.run(command, env=environment, check=True)


def files_of(folder):
    return {
        p.relative_to(folder): (p.stat().st_mtime_ns, p.stat().st_ino)
        for p in Path(folder).rglob("*")
        if p.is_file()
    }


def test_a_second_process_compiles_nothing(tmp_path):
    cache, home = tmp_path / "cache", tmp_path / "home"
    compile_in_another_process(cache, home)
    compiled = files_of(cache)
    assert any(path.suffix == ".cubin" for path in compiled)
    assert {path.parts[0] for path in compiled} == {"triton"}
    compile_in_another_process(cache, home)
    assert files_of(cache) == compiled and not (home / ".triton").exists()


def test_without_a_folder_it_is_the_users_cache(tmp_path):
    compile_in_another_process(None, tmp_path)
    found = {path for path in files_of(tmp_path) if path.suffix == ".cubin"}
    assert found and all(path.parts[:3] == (".cache", "octavo", "triton") for path in found)

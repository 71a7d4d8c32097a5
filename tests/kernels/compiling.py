"""Compile a Triton kernel for a GPU that is not there, and read what the compiler made of it.

Run as a program, since the interpreter of the other tests replaces the compiler of a process:

    python compiling.py MODULE KERNEL CAPABILITY SIGNATURE_JSON CONSTANTS_JSON OPTIONS_JSON
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Compiled:
    """What one kernel became: its PTX, and the registers, stack and shared memory it needs."""

    ptx: str
    num_registers: int
    stack_bytes: int  # spilled registers and indexed arrays
    shared_bytes: int


def compile_for(capability, kernel, signature, constants, **options):
    """`kernel` ("module:name") compiled for a compute capability such as 90."""
    module, name = kernel.split(":")
    arguments = map(json.dumps, (signature, constants, options))
    command = [sys.executable, __file__, module, name, str(capability), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert result.returncode == 0, result.stderr
    return Compiled(**json.loads(result.stdout.splitlines()[-1]))


def _environment():
    import os

    return {**os.environ, "TRITON_INTERPRET": "0"}


def _main(module, name, capability, signature, constants, options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(module), name)
    signature, constants = json.loads(signature), json.loads(constants)
    signature = {arg: signature.get(arg, "constexpr") for arg in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", int(capability), 32)
    compiled = triton.compile(source, target=target, options=json.loads(options))
    usage = _resource_usage(compiled.asm["cubin"])
    found = {key: int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK")}
    result = {
        "ptx": compiled.asm["ptx"],
        "num_registers": found["REG"],
        "stack_bytes": found["STACK"],
        "shared_bytes": compiled.metadata.shared,
    }
    print(json.dumps(result))


def _resource_usage(cubin):
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    _main(*sys.argv[1:])

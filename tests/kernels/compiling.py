"""Compile a Triton kernel for a GPU that is not there, and read what the compiler made of it.

Run as a program, since the interpreter of the other tests replaces the compiler of a process:

    python compiling.py MODULE KERNEL CAPABILITY SIGNATURE CONSTANTS ALIGNED OPTIONS

where the last four are JSON.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Compiled:
    """What one kernel became: its PTX, its machine instructions, and the resources it needs."""

    ptx: str
    opcodes: dict[str, int]  # how often each occurs, without its suffixes
    num_registers: int
    stack_bytes: int  # spilled registers and indexed arrays
    shared_bytes: int


def compile_for(capability, kernel, signature, constants, *, aligned=(), **options):
    """`kernel` ("module:name") compiled for a compute capability such as 90.

    aligned: arguments that are multiples of 16, as strides are at run time; with any of them, the
    pointers are as well.
    """
    module, name = kernel.split(":")
    arguments = map(json.dumps, (signature, constants, list(aligned), options))
    command = [sys.executable, __file__, module, name, str(capability), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert result.returncode == 0, result.stderr
    return Compiled(**json.loads(result.stdout.splitlines()[-1]))


def _environment():
    import os

    return {**os.environ, "TRITON_INTERPRET": "0"}


def _main(module, name, capability, signature, constants, aligned, options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(module), name)
    signature, constants = json.loads(signature), json.loads(constants)
    aligned = json.loads(aligned)
    signature = {arg: signature.get(arg, "constexpr") for arg in function.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (arg, kind) in enumerate(signature.items())
        if arg in aligned or (aligned and kind.startswith("*"))
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", int(capability), 32)
    compiled = triton.compile(source, target=target, options=json.loads(options))
    usage = _cuobjdump("--dump-resource-usage", compiled.asm["cubin"])
    instructions = _cuobjdump("-sass", compiled.asm["cubin"])
    opcode = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)"
    found = {key: int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK")}
    result = {
        "ptx": compiled.asm["ptx"],
        "opcodes": Counter(re.findall(opcode, instructions, re.MULTILINE)),
        "num_registers": found["REG"],
        "stack_bytes": found["STACK"],
        "shared_bytes": compiled.metadata.shared,
    }
    print(json.dumps(result))


def _cuobjdump(option, cubin):
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    _main(*sys.argv[1:])

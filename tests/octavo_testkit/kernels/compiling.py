"""Compile a Triton kernel for a GPU that is not there, and read what the compiler made of it.

Done by another process, since the interpreter of the other tests replaces the compiler of this one.
It is started once and reads one request in JSON from each line: importing takes as long as
compiling.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import cache
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
    request = {
        "capability": capability,
        "kernel": kernel,
        "signature": signature,
        "constants": constants,
        "aligned": list(aligned),
        "options": options,
    }
    compiler = _start()
    print(json.dumps(request), file=compiler.stdin, flush=True)
    reply = json.loads(compiler.stdout.readline())
    assert "error" not in reply, reply["error"]
    return Compiled(**reply)


@cache
def _start():
    """The process that compiles; it ends with this one, when its input does."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__], text=True, env=environment, **pipes)


def _serve():
    for line in sys.stdin:
        try:
            reply = _compile(**json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), flush=True)


def _compile(capability, kernel, signature, constants, aligned, options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, name = kernel.split(":")
    function = getattr(importlib.import_module(module), name)
    signature = {arg: signature.get(arg, "constexpr") for arg in function.arg_names}
    kind_of_source = ASTSource
    if "gluon" in module:
        kind_of_source = GluonASTSource
        signature = {arg: _with_layout(kind) for arg, kind in signature.items()}
    places = {arg: (i,) for i, arg in enumerate(function.arg_names)}
    constants = {places[arg]: value for arg, value in constants.items()}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (arg, kind) in enumerate(signature.items())
        if arg in aligned or (aligned and kind.startswith("*"))
    }
    source = kind_of_source(
        fn=function, signature=signature, constexprs=constants, attrs=attributes
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    usage = _cuobjdump("--dump-resource-usage", compiled.asm["cubin"])
    instructions = _cuobjdump("-sass", compiled.asm["cubin"])
    opcode = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)"
    found = {key: int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK")}
    return {
        "ptx": compiled.asm["ptx"],
        "opcodes": Counter(re.findall(opcode, instructions, re.MULTILINE)),
        "num_registers": found["REG"],
        "stack_bytes": found["STACK"],
        "shared_bytes": compiled.metadata.shared,
    }


def _with_layout(kind):
    """A kind of argument; a descriptor of FP8 tiles, "tensordesc<fp8e4nv[1, 64]>", with layout."""
    from triton.experimental.gluon import language as gl

    if not kind.startswith("tensordesc"):
        return kind
    block = json.loads(kind[kind.index("[") : -1])
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    return f"tensordesc<fp8e4nv{block},{layout!r}>"


def _cuobjdump(option, cubin):
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    _serve()

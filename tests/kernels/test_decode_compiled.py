"""The decode kernels compiled for GPUs that are not here: instructions, registers, no spills.

Run as a program it compiles some variants of one kernel and prints what became of them; alignment
is given as a launch would find it, since without it nothing is loaded by 16 bytes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

FP8 = {"key_ptr": "*fp8e4nv", "value_ptr": "*fp8e4nv"}
BF16 = {"key_ptr": "*bf16", "value_ptr": "*bf16"}
BYTES = {"key_ptr": "*u8", "value_ptr": "*u8"}
POINTERS = {
    "q_ptr": "*bf16",
    "key_scale_ptr": "*fp32",
    "value_scale_ptr": "*fp32",
    "table_ptr": "*i32",
    "item_ptr": "*i32",
    "counter_ptr": "*i32",
    "sink_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "out_ptr": "*bf16",
    "length_ptr": "*i32",
}
FLOATS = {"softmax_scale": "fp32", "softcap": "fp32"}
EVERYTHING = {
    "GRANULARITY": "token",
    "HAS_WINDOW": True,
    "HAS_SOFTCAP": True,
    "HAS_SINKS": True,
    "PAGE_SIZE": 16,
}
PLAIN = {
    "NUM_KV_HEADS": 8,
    "GROUP": 4,
    "Q_LEN": 1,
    "HEAD_DIM": 128,
    "PAGE_SIZE": 64,
    "PARTIAL_ROWS": 4,
    "COMBINE_SPLITS": 16,
    "GRANULARITY": "head",
    "IS_CAUSAL": True,
    "HAS_WINDOW": False,
    "HAS_SOFTCAP": False,
    "HAS_SINKS": False,
}
GLUON = PLAIN | {
    "KEY_TOKEN_STRIDE": 128,
    "VALUE_TOKEN_STRIDE": 128,
    "TILE": 64,
    "COLUMNS": 8,
    "USE_PDL": False,
}
TRITON = PLAIN | {
    "WIDTH": 128,
    "BLOCK": 128,
    "COLUMNS": 16,
    "COMBINE_SPLITS": 4,
    "COMPUTE": "fp16",
    "BYTES_OF": "",
}
SIXTEEN = {"GROUP": 4, "Q_LEN": 4, "COLUMNS": 16, "PARTIAL_ROWS": 16, "COMBINE_SPLITS": 4}


def head_dim(size, **changes):
    strides = {"KEY_TOKEN_STRIDE": size, "VALUE_TOKEN_STRIDE": size}
    return GLUON | {"HEAD_DIM": size, **strides, **changes}


def compile_variants(module, capability, variants):
    """[(pointer types, constants, options)] of a kernel to a list of what each became."""
    command = [sys.executable, __file__, module, str(capability), json.dumps(variants)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_no_spills(found):
    assert [variant["stack_bytes"] for variant in found] == [0] * len(found)


def assert_only_registers(ptx):
    """From the first product to the last, the loop however it was rotated: no shared memory."""
    lines = ptx.splitlines()
    products = [i for i, line in enumerate(lines) if "mma.sync" in line]
    loop = "\n".join(lines[products[0] : products[-1]])
    assert loop.count("ld.global") >= 32
    assert not re.search(r"(ld|st)\.shared|bar\.sync", loop)


@pytest.mark.parametrize("capability", [89, 90, 100])
def test_gluon(capability):
    pytest.importorskip("triton")
    options = {"num_warps": 4, "maxnreg": 255}
    use_pdl = {"USE_PDL": capability >= 90}
    [fp8] = compile_variants("gluon_sm89", capability, [(FP8, GLUON | use_pdl, options)])
    assert_no_spills([fp8])
    assert fp8["ptx"].count("cvt.rn.f16x2.e4m3x2") >= 256
    assert ("griddepcontrol.wait" in fp8["ptx"]) == (capability >= 90)
    assert_only_registers(fp8["ptx"])


def test_gluon_with_everything():
    pytest.importorskip("triton")
    options = {"num_warps": 4, "maxnreg": 255}
    no_limit = {"num_warps": 4}
    wide = head_dim(256, TILE=32, PARTIAL_ROWS=8, COMBINE_SPLITS=4)
    found = compile_variants(
        "gluon_sm89",
        90,
        [
            (BF16, GLUON | {"TILE": 32, "GRANULARITY": "none"}, options),
            (FP8, head_dim(64), no_limit),
            (FP8, GLUON | EVERYTHING | SIXTEEN | {"TILE": 32}, no_limit),
            (FP8, wide | EVERYTHING, options),
            (BF16, GLUON | SIXTEEN | {"TILE": 32, "GRANULARITY": "none"}, no_limit),
        ],
    )
    assert_no_spills(found)
    assert_only_registers(found[0]["ptx"])
    assert found[1]["num_registers"] <= 168  # three programs of four warps on an SM


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_triton(capability):
    pytest.importorskip("triton")
    options = {"num_warps": 4, "num_stages": 1}
    has_type = capability >= 89
    pages = FP8 if has_type else BYTES
    fp8 = TRITON | {"BYTES_OF": "" if has_type else "e4m3"}
    bf16 = TRITON | {"BLOCK": 64, "COMPUTE": "bf16", "GRANULARITY": "none"}
    variants = [(pages, fp8, options)]
    if capability in (80, 90):
        variants += [(BF16, bf16, options), (pages, fp8 | EVERYTHING | {"HEAD_DIM": 72}, options)]
    found = compile_variants("triton", capability, variants)
    assert_no_spills(found)
    assert ("e4m3x2" in found[0]["ptx"]) == has_type
    assert "mma" in found[0]["ptx"]


def test_plan():
    pytest.importorskip("triton")
    constants = {
        "HAS_WINDOW": True,
        "BLOCK_TOKENS": 256,
        "MODES": 4,
        "SEQUENCES": 64,
        "OTHERS": 32,
        "SPLITS": 1,
        "CHUNK": 512,
    }
    options = {"num_warps": 2}
    assert_no_spills(compile_variants("triton:_plan_kernel", 80, [({}, constants, options)]))


def _main(module, capability, variants):
    import importlib

    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, _, name = module.partition(":")
    file = importlib.import_module(f"octavo.kernels.decode.{module}")
    function = getattr(file, name or "_decode_kernel")
    target = GPUTarget("cuda", int(capability), 32)
    types = {"fp16": tl.float16, "bf16": tl.bfloat16}
    for pages, constants, options in json.loads(variants):
        known = {**POINTERS, **FLOATS, **pages, **dict.fromkeys(constants, "constexpr")}
        signature = {name: known.get(name, "i32") for name in function.arg_names}
        if "COMPUTE" in constants:
            constants["COMPUTE"] = types[constants["COMPUTE"]]
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(function.arg_names)
            if signature[name].startswith("*") or name.startswith(("q_", "key_", "value_"))
            if "scale" not in name and signature[name] != "constexpr"
        }
        source = (GluonASTSource if "gluon" in module else ASTSource)(
            fn=function, signature=signature, constexprs=constants, attrs=aligned
        )
        compiled = triton.compile(source, target=target, options=options)
        print(json.dumps({"ptx": compiled.asm["ptx"], **_resources(compiled.asm["cubin"])}))


def _resources(cubin):
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "num_registers": int(re.search(r"\bREG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"\bSTACK:(\d+)", usage)[1]),
    }


if __name__ == "__main__":
    _main(*sys.argv[1:])

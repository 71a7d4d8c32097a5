"""Launch every kernel for a GPU that is not there: Triton compiles it and packs its arguments.

Run as a program, with a compute capability such as 90. Tensors lie on the CPU, ops and launchers
believe that it is the GPU, and a driver takes each launch where Triton would hand it to CUDA. All
that Triton does in Python for a launch, and the compiler, are the real ones. Prints what was
launched in each call as a line of JSON.
"""

import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import LazyDict

from octavo.kernels import device as devices
from octavo.kernels.quantize_qkv.config import token_classes
from octavo.ops import register
from octavo.ops.register import Prepared
from octavo.ops.select import PREPARED
from octavo.ops.warm_up import AttentionLayers, LinearLayers, warm_up_calls

sys.path.insert(0, str(Path(__file__).parents[1]))
from octavo_testkit.counting import num_function_calls

SHARED_BYTES = 227 * 1024


class Driver:
    """Stands for Triton's CUDA driver and notes the arguments of launches."""

    def __init__(self, capability):
        self.capability, self.launched, self.inputs = capability, [], {}
        self.is_deaf = False
        self.launcher_cls = nvidia.CudaLauncher
        self.utils = SimpleNamespace(
            launch=self.launch,
            load_binary=lambda *_: ("module", "function", 1, 0, 1024),
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES},
            build_signature_metadata=list,
            fill_tma_descriptor=self.describe,  # Triton 3.6
            fill_tma_descriptor_tiled=self.describe,
        )

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def describe(self, pointer, swizzle, element_size, element_type, block, shape, strides, *_):
        """A descriptor of TMA, as far as the hardware would take it."""
        assert pointer % 16 == 0 and strides[-1] == 1
        assert all(stride * element_size % 16 == 0 for stride in strides[:-1])
        return f"tensor map {element_size} {element_type} {list(block)}"

    def launch(self, *args):
        if self.is_deaf:
            return
        # Newer versions of Triton give the kernel's arguments as one tuple.
        given = args[-1] if isinstance(args[-1], tuple | list) else args
        self.launched.append([self.kind(x) for x in given])

    def kind(self, x):
        """What a launch may not change: which tensor, a plain value, of all else the type."""
        is_address = isinstance(x, torch.Tensor) or (type(x) is int and x > 2**32)
        if is_address:
            address = x if isinstance(x, int) else x.data_ptr()
            return self.inputs.get(address, "another tensor")
        if isinstance(x, triton.knobs.HookChain | LazyDict):
            return "None"  # what a playback gives in place of an empty chain and its words
        is_plain = x is None or isinstance(x, bool | int | float | str | tuple | list)
        return repr(x) if is_plain else type(x).__name__


def addresses(value):
    """Where the tensors among the arguments of a call lie: address -> number."""
    found = {}

    def note(one):
        if isinstance(one, torch.Tensor):
            found.setdefault(one.data_ptr(), f"tensor {len(found)}")
        elif isinstance(one, tuple | list):
            for part in one:
                note(part)
        elif isinstance(one, dict):
            note(list(one.values()))
        else:
            note(list(getattr(one, "__dict__", {}).values()))

    note([getattr(value, "args", ()), getattr(value, "keywords", {})])
    return found


def install(capability):
    """Make Triton and octavo believe in such a GPU."""
    driver = Driver(capability)
    triton.runtime.driver.set_active(driver)
    # Triton 3.6 compiles a launcher in C for each kernel, newer versions have one for all.
    nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=driver.launch)
    nvidia.library_dirs = list
    nvidia.PyKernelArg, nvidia.ARG_TUPLE = SimpleNamespace, "tuple"
    nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL = "constexpr", "kernel"
    torch.cuda.current_device = lambda: 0
    devices.CPU = devices.Device(
        type="cuda", name="no GPU", capability=divmod(capability, 10), num_sms=132
    )
    return driver


def layers():
    """A layer of each kind; as few as show every kernel once."""
    dtypes = (torch.float8_e4m3fn, torch.bfloat16)
    return [
        AttentionLayers(num_heads=2, num_kv_heads=2, head_dim=72, is_decoder=False),
        *(
            AttentionLayers(num_heads=8, num_kv_heads=2, head_dim=128, page_dtype=dtype)
            for dtype in dtypes
        ),
        LinearLayers(columns=512, depth=256, rows=(1, 256)),
    ]


def main(capability):
    driver = install(capability)
    # One size of each: what the ladders of a warm-up add are other constants of the same kernels.
    register.TAPE_AT = 2  # the third call is played
    ladders = sys.modules["octavo.ops.warm_up"]
    ladders.BATCHES, ladders.ROOMS, ladders.QUERIES = (2,), (1024,), (ladders.NUM_TOKENS,)
    ladders.token_classes = lambda num_scales: token_classes(num_scales)[-1:]
    for name, call in warm_up_calls(layers(), torch.device("cpu")):
        row = {"name": name, "launches": []}
        try:
            driver.inputs = addresses(call)
            with torch.inference_mode():
                for _ in range(3):
                    driver.launched.clear()
                    call()
                    row["launches"].append(list(driver.launched))
                driver.is_deaf = True
                row["function_calls"] = num_function_calls(call)
                driver.is_deaf = False
        except Exception:
            row["error"] = traceback.format_exc()
        print(json.dumps(row), flush=True)
    playbacks = [known.playback for known in PREPARED.values() if isinstance(known, Prepared)]
    print(json.dumps({"playbacks": sum(map(bool, playbacks))}))


if __name__ == "__main__":
    main(int(sys.argv[1]))

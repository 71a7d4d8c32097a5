"""BF16 products on CPUs without BF16 instructions: in float32, and rounded, as others do it.

torch computes them one value at a time there, far slower than in float32 (seen on a Neoverse N1,
torch 2.13).
"""

import platform
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")
NARROW = (torch.bfloat16, torch.float16)


@cache
def use_float32_products() -> torch.library.Library | None:
    """Replace torch's 16-bit products where the CPU has no instructions for them.

    For programs alone, not for libraries: it changes torch in the whole process. Returns what keeps
    the replacement, None if this CPU needs none.
    """
    if platform.machine() != "aarch64" or torch.cpu.get_capabilities()["bf16"]:
        return None
    library = torch.library.Library("aten", "IMPL")
    for name in PRODUCTS:
        _compute_in_float32(library, name)
    return library


def _compute_in_float32(library: torch.library.Library, name: str) -> None:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def call(keys: Any, *args: Any, **options: Any) -> Any:
        narrow = next((x for x in args if _is_narrow(x)), None)
        if narrow is None:
            return kernel.call_boxed(keys, *args, **options)
        options = {key: _widened(x) for key, x in options.items()}
        result = kernel.call_boxed(keys, *map(_widened, args), **options)
        if isinstance(result, tuple):  # attention's, and its logarithms in float32
            return result[0].to(narrow.dtype), *result[1:]
        return result.to(narrow.dtype)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel of torch's is replaced
        library.impl(name, call, "CPU", with_keyset=True, allow_override=True)


def _is_narrow(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in NARROW


def _widened(x: Any) -> Any:
    return x.float() if _is_narrow(x) else x

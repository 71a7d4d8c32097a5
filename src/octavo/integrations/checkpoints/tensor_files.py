"""A checkpoint folder as JSON and headers: which tensors there are, and single ones of them.

The safetensors package maps a whole file into memory for one tensor, which a machine with less
memory than the model has may refuse. Here a file's header is read, and then only what is asked for.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.brief import brief, list_names, unique_keys
from octavo.calibration.scale_document import MAX_SCALE, MIN_SCALE
from octavo.errors import CheckpointError

CONFIG_NAME = "config.json"
HF_QUANT_CONFIG_NAME = "hf_quant_config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # as the safetensors package has it
MAX_JSON_BYTES = 100_000_000
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is: its file, its first byte there and the one after its last."""

    name: str
    path: Path
    dtype: str  # as safetensors writes it: "BF16"
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        """How many numbers the tensor has."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class CheckpointFiles:
    """What a checkpoint folder says without its weights; `index` is None where there is none."""

    folder: Path
    config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None
    index: dict[str, Any] | None
    weight_paths: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, folder: Path) -> "CheckpointFiles":
        """Read the JSON files and every header; CheckpointError if they contradict each other."""
        if not folder.is_dir():
            raise CheckpointError(f"expected a model's folder, got none at {folder}")
        config = read_json(folder / CONFIG_NAME)
        if config is None:
            names = list_names(sorted(path.name for path in folder.iterdir()))
            raise CheckpointError(f"expected {CONFIG_NAME} in {folder}, got {names or 'nothing'}")
        index = _read_index(folder / INDEX_NAME, is_flat=True)
        weight_map = {} if index is None else index["weight_map"]
        has_single = (folder / SINGLE_NAME).exists()
        if index is not None and has_single and SINGLE_NAME not in weight_map.values():
            raise CheckpointError(
                f"expected {SINGLE_NAME} or {INDEX_NAME}, got both; transformers reads the first "
                "and vLLM the second: remove one"
            )
        weights = {SINGLE_NAME} if index is None and has_single else {*weight_map.values()}
        paths = tuple(folder / name for name in sorted(weights))
        tensors = read_headers(paths)
        for name, file_name in weight_map.items():
            if name not in tensors or tensors[name].path.name != file_name:
                raise CheckpointError(
                    f"{INDEX_NAME}: expected {brief(name)} in {file_name}, got none there"
                )
        hf_quant_config = read_json(folder / HF_QUANT_CONFIG_NAME)
        return cls(folder, config, hf_quant_config, index, paths, tensors)

    def text_value(self, key: str) -> Any:
        """A setting of the language model: config.json has it at the top or in a section."""
        sections = (self.config, *(self.config.get(name) for name in ("text_config", "llm_config")))
        found = (section.get(key) for section in sections if isinstance(section, dict))
        return next((value for value in found if value is not None), None)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path.name}: expected at most {MAX_JSON_BYTES} bytes")
        document = json.loads(path.read_text("utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: expected JSON in UTF-8: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path.name}: expected an object, got {brief(document)}")
    return document


def damaged(path: Path, what: str) -> CheckpointError:
    """The error of a weight file that is not what it should be."""
    return CheckpointError(f"{path} is damaged: {what}; download or copy it again")


def read_header(path: Path) -> Iterator[TensorEntry]:
    """The tensors of a safetensors file; nothing but its header is read."""
    try:
        with open(path, "rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES
            if header_size > min(MAX_HEADER_BYTES, file_size - 8):
                raise damaged(path, _not_safetensors(prefix))
            header = json.loads(file.read(header_size), object_pairs_hook=unique_keys)
        if not isinstance(header, dict):
            raise damaged(path, f"expected a header of tensors, got {brief(header)}")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"expected a safetensors header: {error}") from None
    header.pop("__metadata__", None)
    for name, row in header.items():
        try:
            start, stop = (8 + header_size + int(offset) for offset in row["data_offsets"])
            dtype, shape = str(row["dtype"]), tuple(int(size) for size in row["shape"])
        except (KeyError, TypeError, ValueError):
            raise damaged(path, f"{brief(name)}: got {brief(row)}") from None
        if not 8 + header_size <= start <= stop <= file_size:
            raise damaged(
                path,
                f"{brief(name)} goes beyond the end of the file, which has {file_size:,} of "
                f"{stop:,} bytes",
            )
        yield TensorEntry(name, path, dtype, shape, start, stop)


def read_headers(paths: Iterable[Path]) -> dict[str, TensorEntry]:
    """The tensors of several safetensors files by name, each of which must be in one file only."""
    tensors: dict[str, TensorEntry] = {}
    for path in paths:
        for entry in read_header(path):
            if entry.name in tensors:
                names = list_names([tensors[entry.name].path.name, path.name])
                raise CheckpointError(f"expected {brief(entry.name)} once, got it in {names}")
            tensors[entry.name] = entry
    return tensors


def _not_safetensors(prefix: bytes) -> str:
    if not prefix:
        return "the file is empty"
    if prefix == b"version ":  # https://git-lfs.github.com/spec/v1
        return "expected weights, got a pointer of Git LFS to them (git lfs pull)"
    return f"expected a safetensors file, got one that begins with {brief(prefix)}"


def read_tensor(entry: TensorEntry) -> Tensor:
    """One tensor of floating-point numbers; no other byte of its file is read."""
    dtype = FLOAT_DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{brief(entry.name)}: expected {', '.join(FLOAT_DTYPES)}, got {entry.dtype}"
        )
    num_bytes = entry.stop - entry.start
    if num_bytes != entry.num_elements * dtype.itemsize:
        raise CheckpointError(
            f"{brief(entry.name)}: expected {entry.num_elements} numbers of {entry.dtype}, "
            f"got {num_bytes} bytes"
        )
    return torch.frombuffer(_read_bytes(entry), dtype=dtype).reshape(entry.shape)


def read_scales(entry: TensorEntry) -> Tensor:
    """A tensor of scales, float64."""
    scales = read_tensor(entry).double()
    is_right = (scales >= MIN_SCALE) & (scales <= MAX_SCALE)
    if not bool(is_right.all()):
        wrong = scales[~is_right].flatten()[:5].tolist()
        raise CheckpointError(
            f"{brief(entry.name)}: expected positive finite scales, 2^-126 to 2^126, got "
            f"{', '.join(map(str, wrong))}"
        )
    return scales


def check_zeros(entry: TensorEntry) -> None:
    """Raise CheckpointError unless a zero point is what symmetric quantization has: zeros."""
    if entry.dtype in ("F8_E4M3", "I8", "U8", "I32", "I64"):
        is_zero = not any(_read_bytes(entry))
    else:
        is_zero = not read_tensor(entry).any()
    if not is_zero:
        raise CheckpointError(f"{brief(entry.name)}: expected zeros (symmetric), got others")


def _read_bytes(entry: TensorEntry) -> bytearray:
    with open(entry.path, "rb") as file:
        file.seek(entry.start)
        content = bytearray(file.read(entry.stop - entry.start))
    if len(content) < entry.stop - entry.start:
        raise CheckpointError(f"{brief(entry.name)}: the file {entry.path.name} ends too early")
    return content


def _read_index(path: Path, *, is_flat: bool = False) -> dict[str, Any] | None:
    """The index of weight files, all of which are there; None if there is no index.

    is_flat: whether they have to be beside it.
    """
    try:
        index = read_json(path)
    except CheckpointError as error:
        raise damaged(path, str(error)) from None
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
        raise damaged(path, "expected a weight_map of file names")
    names = sorted(set(weight_map.values()))
    if is_flat and (outside := [name for name in names if Path(name).name != name]):
        raise CheckpointError(f"{path.name}: expected file names, got {list_names(outside)}")
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise CheckpointError(
            f"{path} names weight files that are missing: {list_names(missing)}; download or copy "
            "them again"
        )
    return index


def find_damage(place: Path) -> str | None:
    """What is wrong with a weight file, or with the first damaged one of a folder, and what to do.

    None if headers and sizes of all safetensors and GGUF files are right, and every file that an
    index names is there. The numbers themselves are not read.
    """
    try:
        for file in _weight_files(place):
            if file.suffix == ".gguf":
                _check_gguf(file)
                continue
            end = max((entry.stop for entry in read_header(file)), default=0)
            if end and end != (size := file.stat().st_size):
                raise damaged(file, f"expected {end:,} bytes by its header, got {size:,}")
    except CheckpointError as error:
        return str(error)
    return None


def _weight_files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    for front in ("", "*/"):  # the components of a pipeline have folders of their own
        for index in sorted(place.glob(f"{front}*.index.json")):
            _read_index(index)
        yield from sorted(place.glob(f"{front}*.safetensors"))
        yield from sorted(place.glob(f"{front}*.gguf"))


def _check_gguf(path: Path) -> None:
    with open(path, "rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise damaged(path, f"expected a GGUF file, got one that begins with {brief(start)}")
    try:
        from gguf import GGUFReader
    except ImportError:
        return
    try:
        GGUFReader(path)
    except (IndexError, KeyError, OSError, OverflowError, ValueError) as error:
        reason = f"its content ends too early or is no GGUF ({brief(str(error))})"
        raise damaged(path, reason) from None

"""Data to calibrate on, in a fixed order: images, texts and chats, and prompts to draw.

Images come from a folder, texts from plain files; both from rows of files and of data sets on the
hub. Nothing here knows a tokenizer: documents are read lazily, and whoever runs a model cuts them
into windows of tokens.
"""

import base64
import binascii
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from octavo.brief import brief, list_names
from octavo.calibration.rows import (
    ROW_SUFFIXES,
    Row,
    file_fingerprint,
    is_path,
    listing_digest,
    made_of,
    open_dataset,
    open_file,
)
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import need

if TYPE_CHECKING:
    from PIL.Image import Image

Prompt = TypeVar("Prompt")

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
IMAGE_FIELDS = ("image", "images")
TEXT_SUFFIXES = (".jsonl", ".md", ".parquet", ".txt")
TEXT_FIELDS = ("text", "messages", "conversations")
# ShareGPT's speakers, in the words of chat templates.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}

_PIECE_SIZE = 2**16  # characters

ImagePrompt = list["Image"]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class PromptData(Generic[Prompt]):
    """Prompts, opened when they are asked for.

    name: what was asked for. fingerprint: other data has another one. num_prompts: how many there
    are; None where only the end will tell. read: the prompts from this one on, always in the same
    order, so that a run that was interrupted can go on with the next one.
    """

    name: str
    fingerprint: str
    num_prompts: int | None
    read: Callable[[int], Iterator[Prompt]]

    def prompts(self, num_prompts: int, *, start: int = 0) -> Iterator[Prompt]:
        """The first `num_prompts`, or as many as there are, without the first `start`."""
        return islice(self.read(start), max(0, num_prompts - start))


def batches(prompts: Iterator[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """The prompts in lists of `batch_size`; the last may be shorter."""
    if batch_size < 1:
        raise ConfigError(f"expected a batch_size from 1 on, got {batch_size}")
    while batch := list(islice(prompts, batch_size)):
        yield batch


def open_images(
    data: str, *, split: str = "train", subset: str | None = None
) -> PromptData[ImagePrompt]:
    """The images of a folder, of a file with one prompt per row, or of a data set on the hub.

    Rows have a field "image" or "images": a path, base64 or a data URL in .jsonl; bytes, or bytes
    with a path, in .parquet. split and subset: of a data set.
    """
    path = Path(data)
    if data and path.is_dir():
        paths = _files(path, "images", lambda path: path.suffix.lower(), IMAGE_SUFFIXES)
        fingerprint = f"{len(paths)} images {listing_digest(paths)}"

        def read(start: int) -> Iterator[ImagePrompt]:
            return ([_open(path)] for path in paths[start:])

        return PromptData(data, fingerprint, len(paths), read)
    if path.suffix not in ROW_SUFFIXES and is_path(data):
        raise ConfigError(
            f"expected a folder of images, a .jsonl or .parquet file, or a data set's name such as "
            f"lmarena-ai/VisionArena-Chat, got {brief(data)}"
        )
    return _from_rows(_image_prompt, data, "images", split, subset)


def _from_rows(
    prompt_of: Callable[[Row], Prompt], data: str, what: str, split: str, subset: str | None
) -> PromptData[Prompt]:
    """A prompt of each row of a file, or of a data set on the hub."""
    if Path(data).suffix in ROW_SUFFIXES:
        rows = open_file(Path(data), what)
    else:
        rows = open_dataset(data, what, split=split, subset=subset)
    return PromptData(
        data, rows.fingerprint, None, lambda start: made_of(rows.read(start), prompt_of)
    )


def _files(
    folder: Path, what: str, kind: Callable[[Path], str], kinds: tuple[str, ...]
) -> list[Path]:
    """The files of a folder of one of these kinds, sorted; ConfigError if there are none."""
    paths = sorted(path for path in folder.iterdir() if kind(path) in kinds and path.is_file())
    if not paths:
        raise ConfigError(
            f"expected {what} ({', '.join(kinds)}) in the folder {folder}, got none; subfolders "
            "are not searched"
        )
    return paths


def _image_prompt(source: Row) -> ImagePrompt:
    """All images of one row."""
    row = source.content
    if not isinstance(row, Mapping):
        raise CheckpointError(f"expected an object with image or images, got {brief(row)}")
    found = [row[field] for field in IMAGE_FIELDS if row.get(field) is not None]
    if len(found) != 1:
        got = "both" if found else f"only {list_names([str(key) for key in row]) or 'nothing'}"
        raise CheckpointError(f"expected image or images, got {got}")
    cells = found[0] if isinstance(found[0], list | tuple) else found
    if not cells:
        raise CheckpointError("expected at least one image, got an empty list")
    return [read_image(cell, source.folder) for cell in cells]


def read_image(cell: object, folder: Path | None) -> "Image":
    """One image: bytes, {"bytes", "path"}, a path relative to the folder, base64 or a data URL."""
    match cell:
        case (bytes() | bytearray() as content) | {"bytes": bytes(content)}:
            return _open(bytes(content))
        case {"path": str(path)}:
            return read_image(path, folder)
        case str() if cell.startswith(("http://", "https://")):
            raise UnsupportedError(f"expected an image at hand, got {brief(cell)}")
        case str() if (file := _existing(cell, folder)) is not None:
            return _open(file)
        case str() if cell.lower().endswith(IMAGE_SUFFIXES):
            raise CheckpointError(f"expected an image file, got none at {brief(cell)}")
        case str():
            encoded = cell.partition(",")[2] if cell.startswith("data:") else cell
            try:
                return _open(base64.b64decode(encoded, validate=True))
            except (binascii.Error, ValueError):
                raise CheckpointError(
                    f"expected the path of an image, or one in base64, got {brief(cell)}"
                ) from None
    raise CheckpointError(f"expected an image or the path of one, got {brief(cell)}")


def _existing(text: str, folder: Path | None) -> Path | None:
    """The file that a text names, relative to `folder`; None if it names none."""
    try:
        path = (folder or Path()) / os.path.expanduser(text)
        return path if path.is_file() else None
    except (OSError, ValueError):  # base64 is too long for a name
        return None


def _open(source: Path | bytes) -> "Image":
    """The image in a file or in memory, upright and in RGB."""
    need("reading images", "PIL")
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        where = f"{source}: " if isinstance(source, Path) else ""
        raise CheckpointError(f"{where}expected an image: {error}") from None


@dataclass(frozen=True)
class Passage:
    """A text in pieces, read when they are asked for, and where it stands."""

    pieces: Iterable[str]
    where: str


@dataclass(frozen=True)
class Chat:
    """The messages of a conversation, {"role", "content"}, and where it stands."""

    messages: tuple[Message, ...]
    where: str


Document = Passage | Chat


TextData = PromptData[Document]


def open_texts(data: str, *, split: str = "train", subset: str | None = None) -> TextData:
    """The documents of a file, of all files of a folder, or of a data set on the hub.

    A .jsonl or .parquet file, and a data set, has one document per row: a field "text", or
    "messages" or "conversations" (ShareGPT's), or a row that is a list of messages. Any other file
    is one text in UTF-8. split and subset: of a data set.
    """
    path = Path(data)
    if data and path.is_dir():
        paths = _files(path, "texts", lambda path: path.suffix, TEXT_SUFFIXES)
        files = [open_texts(str(file)) for file in paths]

        def read(start: int) -> Iterator[Document]:
            return islice((one for file in files for one in file.read(0)), start, None)

        return PromptData(data, f"{len(paths)} files {listing_digest(paths)}", None, read)
    if path.suffix in ROW_SUFFIXES:
        return _from_rows(_document, data, "texts", split, subset)
    if data and path.is_file():
        if path.suffix == ".json":
            raise ConfigError(
                f"expected one row per line, got {data}: convert a list in JSON by "
                f"jq -c '.[]' {path.name} > {path.stem}.jsonl"
            )
        return PromptData(
            data,
            file_fingerprint(path),
            1,
            lambda start: iter([Passage(_pieces(path), data)][start:]),
        )
    if is_path(data) or path.suffix in TEXT_SUFFIXES:
        raise ConfigError(
            "expected a file or folder of text, a .jsonl or .parquet file, or a data set's name "
            f"such as HuggingFaceH4/ultrachat_200k, got {brief(data)}"
        )
    return _from_rows(_document, data, "texts", split, subset)


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file, cut behind line ends: a tokenizer sees whole words."""
    rest = ""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while read := file.read(_PIECE_SIZE):
                head, end, tail = (rest + read).rpartition("\n")
                # A line longer than a piece is cut anywhere.
                piece, rest = (head + end, tail) if end else (tail, "")
                yield piece
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected a text in UTF-8: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: expected a text: {error.strerror}") from None
    if rest:
        yield rest


def _document(row: Row) -> Document:
    content, where = row.content, row.where
    if not isinstance(content, Mapping | list | tuple):
        raise CheckpointError(
            "expected an object with text, messages or conversations, or a list of messages, got "
            f"{brief(content)}"
        )
    messages: object = content
    if isinstance(content, Mapping):
        found = [field for field in TEXT_FIELDS if content.get(field) is not None]
        if len(found) != 1:
            got = list_names(found or [str(key) for key in content]) or "nothing"
            raise CheckpointError(f"expected one of {', '.join(TEXT_FIELDS)}, got {got}")
        messages = content[found[0]]
        if found[0] == "text":
            if not isinstance(messages, str):
                raise CheckpointError(f"expected text to be a string, got {brief(messages)}")
            return Passage((messages,), where)
    if not isinstance(messages, list | tuple) or not messages:
        raise CheckpointError(f"expected a list of messages, got {brief(messages)}")
    return Chat(tuple(map(_message, messages)), where)


def _message(message: object) -> Message:
    if not isinstance(message, Mapping):
        raise CheckpointError(f"expected a message, got {brief(message)}")
    # The rows of a table have every field that one of them has.
    known = {key: value for key, value in message.items() if value is not None}
    match known:
        case {"role": str()}:
            return {**known, "content": _content(known.get("content", ""))}
        case {"from": str(speaker), "value": str(text)} if speaker in ROLES:
            return {"role": ROLES[speaker], "content": text}
    raise CheckpointError(
        "expected a message with role and content, or with value and from, one of "
        f"{', '.join(ROLES)}, got {brief(dict(known))}"
    )


def _content(content: object) -> str:
    """The text of a message, which may be in parts."""
    texts: list[str] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case str() if part is content:
                return part
            case _:
                raise CheckpointError(f"expected the content to be text, got {brief(content)}")
    return "".join(texts)


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """The prompts of a file: its lines that are not blank, or `prompt` of each row of a .jsonl."""
    place = Path(path)
    if not place.is_file():
        raise ConfigError(f"expected a file of prompts, got none at {place}")
    if place.suffix == ".jsonl":
        prompts = list(made_of(open_file(place, "prompts").read(0), _prompt))
    else:
        try:
            lines = place.read_text("utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{place}: expected text in UTF-8: {error}") from None
        prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{place}: expected prompts, one in a line, got none")
    return prompts


def _prompt(row: Row) -> str:
    content: Any = row.content
    text = content.get("prompt") if isinstance(content, dict) else content
    if not isinstance(text, str) or not text.strip():
        raise CheckpointError(f'expected a text, or {{"prompt": "…"}}, got {brief(content)}')
    return text

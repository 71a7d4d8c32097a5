"""Texts to calibrate on: plain files, rows of text or of chats, a data set's name, or prompts.

Nothing here knows a tokenizer: documents are read lazily, and whoever runs a model cuts them into
windows of tokens.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from octavo.brief import brief, list_names
from octavo.calibration.data import (
    ROW_SUFFIXES,
    Row,
    Rows,
    file_fingerprint,
    is_path,
    listing_digest,
    open_dataset,
    open_file,
)
from octavo.errors import CheckpointError, ConfigError

FOLDER_SUFFIXES = (".jsonl", ".md", ".parquet", ".txt")
FIELDS = ("text", "messages", "conversations")
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

Message = Mapping[str, Any]


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


@dataclass(frozen=True)
class TextData:
    """Documents in a fixed order.

    name: what was asked for. fingerprint: other data has another one. read: all documents, from the
    first one on.
    """

    name: str
    fingerprint: str
    read: Callable[[], Iterator[Document]]


def open_texts(data: str, *, split: str = "train", subset: str | None = None) -> TextData:
    """The documents of a file, of all files of a folder, or of a data set on the hub.

    A .jsonl or .parquet file, and a data set, has one document per row: a field "text", or
    "messages" or "conversations" (ShareGPT's), or a row that is a list of messages. Any other file
    is one text in UTF-8. split and subset: of a data set.
    """
    path = Path(data)
    if data and path.is_dir():
        return _folder(data, path)
    if path.suffix in ROW_SUFFIXES or (data and path.is_file()):
        return _file(data, path)
    if is_path(data) or path.suffix in FOLDER_SUFFIXES:
        raise ConfigError(
            "expected a file or folder of text, a .jsonl or .parquet file, or a data set's name "
            f"such as HuggingFaceH4/ultrachat_200k, got {brief(data)}"
        )
    rows = open_dataset(data, "texts", split=split, subset=subset)
    return TextData(data, rows.fingerprint, partial(_documents, rows))


def _folder(name: str, folder: Path) -> TextData:
    paths = sorted(p for p in folder.iterdir() if p.suffix in FOLDER_SUFFIXES and p.is_file())
    if not paths:
        raise ConfigError(
            f"expected texts ({', '.join(FOLDER_SUFFIXES)}) in the folder {name}, got none; "
            "subfolders are not searched"
        )
    files = [_file(str(path), path) for path in paths]

    def read() -> Iterator[Document]:
        for file in files:
            yield from file.read()

    return TextData(name, f"{len(paths)} files {listing_digest(paths)}", read)


def _file(name: str, path: Path) -> TextData:
    if path.suffix in ROW_SUFFIXES:
        rows = open_file(path, "texts")
        return TextData(name, rows.fingerprint, partial(_documents, rows))
    if path.suffix == ".json":
        raise ConfigError(
            f"expected one row per line, got {name}: convert a list in JSON by "
            f"jq -c '.[]' {path.name} > {path.stem}.jsonl"
        )
    return TextData(name, file_fingerprint(path), lambda: iter([Passage(_pieces(path), str(path))]))


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


def _documents(rows: Rows) -> Iterator[Document]:
    return map(_document, rows.read(0))


def _document(row: Row) -> Document:
    content, where = row.content, row.where
    if _is_list(content):
        return _chat(content, where)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{where}: expected an object with text, messages or conversations, or a list of "
            f"messages, got {brief(content)}"
        )
    found = [field for field in FIELDS if content.get(field) is not None]
    if len(found) != 1:
        got = list_names(found or [str(key) for key in content]) or "nothing"
        raise CheckpointError(f"{where}: expected one of {', '.join(FIELDS)}, got {got}")
    cell = content[found[0]]
    if found[0] != "text":
        return _chat(cell, where)
    if not isinstance(cell, str):
        raise CheckpointError(f"{where}: expected text to be a string, got {brief(cell)}")
    return Passage((cell,), where)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _chat(messages: object, where: str) -> Chat:
    if not isinstance(messages, Sequence) or not _is_list(messages) or not messages:
        raise CheckpointError(f"{where}: expected a list of messages, got {brief(messages)}")
    return Chat(tuple(_message(message, where) for message in messages), where)


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise CheckpointError(f"{where}: expected a message, got {brief(message)}")
    # The rows of a table have every field that one of them has.
    known = {key: value for key, value in message.items() if value is not None}
    match known:
        case {"role": str()}:
            return {**known, "content": _content(known.get("content", ""), where)}
        case {"from": str(speaker), "value": str(text)} if speaker in ROLES:
            return {"role": ROLES[speaker], "content": text}
    raise CheckpointError(
        f"{where}: expected a message with role and content, or with value and from, one of "
        f"{', '.join(ROLES)}, got {brief(dict(known))}"
    )


def _content(content: object, where: str) -> str:
    """The text of a message, which may be in parts."""
    if isinstance(content, str):
        return content
    texts = [_text_of(part) for part in content] if isinstance(content, list | tuple) else [None]
    if any(text is None for text in texts):
        raise CheckpointError(f"{where}: expected the content to be text, got {brief(content)}")
    return "".join(text or "" for text in texts)


def _text_of(part: object) -> str | None:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    return None


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """The prompts of a file: its lines that are not blank, or `prompt` of each row of a .jsonl."""
    place = Path(path)
    if not place.is_file():
        raise ConfigError(f"expected a file of prompts, got none at {place}")
    if place.suffix == ".jsonl":
        prompts = [_prompt(row) for row in open_file(place, "prompts").read(0)]
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
        raise CheckpointError(
            f'{row.where}: expected a text, or {{"prompt": "…"}}, got {brief(content)}'
        )
    return text

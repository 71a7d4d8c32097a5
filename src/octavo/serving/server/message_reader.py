"""An answer's text to a message: its content and its tool calls, piece by piece."""

import json
import uuid
from dataclasses import dataclass
from typing import Any, Literal, Protocol

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CallPiece:
    """A part of a tool call; the first one of a call carries its id and name."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


Piece = str | CallPiece


class MessageReader(Protocol):
    """Takes text as it comes; `finish_reason` is what a finished answer says in place of stop."""

    finish_reason: Literal["stop", "tool_calls"]

    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class PlainReader:
    """All of it is content."""

    finish_reason: Literal["stop", "tool_calls"] = "stop"

    def feed(self, text: str) -> list[Piece]:
        return [text] if text else []

    def finish(self) -> list[Piece]:
        return []


class NamedCallReader:
    """All of it is the arguments of one function, as guided decoding has made it."""

    def __init__(self, name: str, finish_reason: Literal["stop", "tool_calls"]) -> None:
        self.finish_reason: Literal["stop", "tool_calls"] = finish_reason
        self._name = name
        self._is_started = False

    def feed(self, text: str) -> list[Piece]:
        if self._is_started:
            return [CallPiece(0, text)] if text else []
        self._is_started = True
        return [CallPiece(0, text, _new_id(), self._name)]

    def finish(self) -> list[Piece]:
        return self.feed("")


class AnyCallReader:
    """{"name": …, "arguments": …}, as guided decoding has made it; known when it is complete.

    One that was cut off stays content: nobody can tell what it would have called.
    """

    finish_reason: Literal["stop", "tool_calls"] = "stop"

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        call = parse_call(self._text, 0)
        if call is None:
            return [self._text] if self._text else []
        self.finish_reason = "tool_calls"
        return [call]


class AutoCallReader:
    """Content, with calls in <tool_call>…</tool_call> where the model chooses to make some.

    What is between the tags and is no call stays content, tags included.
    """

    finish_reason: Literal["stop", "tool_calls"] = "stop"

    def __init__(self) -> None:
        self._text = ""  # not handed on yet
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while True:
            before, tag, rest = self._text.partition(OPENING)
            if not tag:
                keep = _overlap(before, OPENING)
                shown, self._text = before[: len(before) - keep], before[len(before) - keep :]
                return pieces + self._content(shown)
            inside, end, after = rest.partition(CLOSING)
            if not end:
                self._text = tag + rest
                return pieces + self._content(before)
            pieces += self._content(before)
            pieces += self._call_or_content(inside)
            self._text = after

    def finish(self) -> list[Piece]:
        # Models may end instead of closing the last tag.
        text, self._text = self._text, ""
        if text.startswith(OPENING) and parse_call(text.removeprefix(OPENING), 0) is not None:
            return self._call_or_content(text.removeprefix(OPENING))
        return self._content(text)

    def _content(self, text: str) -> list[Piece]:
        # Line breaks between calls are the template's, not the message's.
        return [] if not text or (self._num_calls and not text.strip()) else [text]

    def _call_or_content(self, inside: str) -> list[Piece]:
        call = parse_call(inside, self._num_calls)
        if call is None:
            return [OPENING + inside + CLOSING]
        self._num_calls += 1
        self.finish_reason = "tool_calls"
        return [call]


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters of `text` may be the beginning of `tag`."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)


def parse_call(text: str, index: int) -> CallPiece | None:
    """The whole call in {"name": …, "arguments": …}, or None."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    return CallPiece(index, written, _new_id(), call["name"])

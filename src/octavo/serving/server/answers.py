"""Answers in OpenAI's words: content and tool calls, in whole bodies or the chunks of a stream."""

import copy
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.serving.engine.request import Completion, Delta, TokenLogprobs, Usage

Json = dict[str, Any]
AnswerKind = Literal["chat.completion", "text_completion"]
OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CallPiece:
    """A part of a tool call; the first one of a call carries its id and name."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


Piece = str | CallPiece


class MessageReader:
    """Reads an answer's text as it comes; here all of it is content.

    finish_reason: what a finished answer says in place of stop.
    """

    finish_reason: Literal["stop", "tool_calls"] = "stop"

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are known with this text."""
        return [text] if text else []

    def finish(self) -> list[Piece]:
        """The pieces that are known at the end of the text."""
        return []


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class NamedCallReader(MessageReader):
    """All of it is the arguments of one function, as guided decoding has made it."""

    def __init__(self, name: str, finish_reason: Literal["stop", "tool_calls"]) -> None:
        self.finish_reason = finish_reason
        self._name = name
        self._is_started = False

    def feed(self, text: str) -> list[Piece]:
        if self._is_started:
            return [CallPiece(0, text)] if text else []
        self._is_started = True
        return [CallPiece(0, text, _new_id(), self._name)]

    def finish(self) -> list[Piece]:
        return self.feed("")


class AnyCallReader(MessageReader):
    """{"name": …, "arguments": …}, as guided decoding has made it; known when it is complete.

    One that was cut off stays content: nobody can tell what it would have called.
    """

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


class AutoCallReader(MessageReader):
    """Content, with calls in <tool_call>…</tool_call> where the model chooses to make some.

    What is between the tags and is no call stays content, tags included.
    """

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


class TokenTexts:
    """The text of single tokens, for logprobs; half a character is shown as U+FFFD."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # the event loop's own
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._tokenizer.decode([token])
        return self._known[token]

    def learn(self, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Look up the texts of tokens now: another thread may not use the tokenizer later."""
        for one in logprobs or ():
            for token in (one.token, *(token for token, _ in one.top)):
                self[token]

    def bytes_of(self, token: int) -> list[int] | None:
        """The UTF-8 of a token; None where it is only a part of a character."""
        text = self[token]
        return None if "\ufffd" in text else list(text.encode())


def usage_body(usage: Usage) -> Json:
    """Counts of tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Writer:
    """Writes the choices of one answer, whole or as a stream; a writer is used once.

    kind: OpenAI's name of the answer. choices: by the engine's request, in the order of their
    index; num_per_prompt of them in a row answer the same prompt.
    """

    def __init__(
        self,
        answer_id: str,
        kind: AnswerKind,
        model: str,
        choices: Mapping[str, "Choice"],
        num_per_prompt: int = 1,
    ) -> None:
        self.answer_id, self._kind = answer_id, kind
        self._chunk_kind = "chat.completion.chunk" if kind == "chat.completion" else kind
        self._fields = {"id": answer_id, "created": int(time.time()), "model": model}
        self._choices = choices
        self._indices = {request_id: index for index, request_id in enumerate(choices)}
        self._num_per_prompt = num_per_prompt
        self._usages = [Usage(prompt_tokens=0, completion_tokens=0)] * len(choices)
        self._total = Usage(prompt_tokens=0, completion_tokens=0)

    def count(self, delta: Delta) -> Usage:
        """Note a delta's tokens; the usage of all choices so far, each prompt counted once."""
        index = self._indices[delta.request_id]
        old, new, total = self._usages[index], delta.usage, self._total
        counts_prompt = index % self._num_per_prompt == 0
        # Not summed again: a step has a delta for each of up to 128 choices.
        self._total = Usage(
            prompt_tokens=total.prompt_tokens
            + counts_prompt * (new.prompt_tokens - old.prompt_tokens),
            completion_tokens=total.completion_tokens
            + (new.completion_tokens - old.completion_tokens),
            cached_tokens=total.cached_tokens
            + counts_prompt * (new.cached_tokens - old.cached_tokens),
        )
        self._usages[index] = new
        return self._total

    def opening(self) -> list[Json]:
        """What a stream begins with."""
        return [
            self._chunk(request_id, part)
            for request_id, choice in self._choices.items()
            for part in choice.opening()
        ]

    def chunks(self, delta: Delta) -> list[Json]:
        """What a stream adds for a delta."""
        parts = self._choices[delta.request_id].chunks(delta)
        return [self._chunk(delta.request_id, part) for part in parts]

    def usage_chunk(self) -> Json:
        """The chunk after the last one, for those who asked for it."""
        usage = usage_body(self._total)
        return {**self._fields, "object": self._chunk_kind, "choices": [], "usage": usage}

    def content(self, completions: Sequence[Completion]) -> bytes:
        """The whole answer at once, as JSON; any thread may call it.

        Choice by choice: the encoder of a large document lets no other thread run.
        """
        fields = {**self._fields, "object": self._kind, "usage": usage_body(self._total)}
        both = zip(self._choices.values(), completions, strict=True)
        choices = [_json({"index": i, **choice.whole(one)}) for i, (choice, one) in enumerate(both)]
        return b'%s, "choices": [%s]}' % (_json(fields)[:-1], b", ".join(choices))

    def _chunk(self, request_id: str, part: Json) -> Json:
        choice = {"index": self._indices[request_id], **part}
        return {**self._fields, "object": self._chunk_kind, "choices": [choice]}


class ChatChoice:
    """A choice of chat.completion and chat.completion.chunk; like any other it is written once."""

    def __init__(self, texts: TokenTexts, reader: MessageReader) -> None:
        self._texts = texts
        self._reader = reader

    def opening(self) -> list[Json]:
        """What a stream begins with."""
        return [self._part({"role": "assistant", "content": ""})]

    def chunks(self, delta: Delta) -> list[Json]:
        """What a stream adds for a delta."""
        pieces = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        found = [self._part(_piece_delta(piece)) for piece in pieces]
        if delta.logprobs:
            # They belong to the tokens of this step; text that waits for more comes without.
            found = found or [self._part({})]
            found[0]["logprobs"] = self._logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            found.append(self._part({}, self._finish_reason(delta.finish_reason)))
        return found

    def whole(self, completion: Completion) -> Json:
        """The whole choice at once."""
        pieces = self._reader.feed(completion.text) + self._reader.finish()
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = _whole_calls(pieces)
        if content or not calls:
            message["content"] = content
        if calls:
            message["tool_calls"] = calls
        logprobs = completion.logprobs
        return {
            "message": message,
            "logprobs": None if logprobs is None else self._logprobs(logprobs),
            "finish_reason": self._finish_reason(completion.finish_reason),
        }

    def _part(self, delta: Json, finish_reason: str | None = None) -> Json:
        return {"delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _finish_reason(self, of_engine: str) -> str:
        return self._reader.finish_reason if of_engine == "stop" else of_engine

    def _logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> Json:
        content = [
            {
                **self._token(one.token, one.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self._texts[token],
            "logprob": _finite(logprob),
            "bytes": self._texts.bytes_of(token),
        }


class TextChoice:
    """A choice of text_completion, whole and in chunks.

    echo: the prompt's text if the answer is to begin with it.
    """

    def __init__(self, texts: TokenTexts, echo: str = "") -> None:
        self._texts, self._echo = texts, echo
        self._offset = 0

    def opening(self) -> list[Json]:
        return [self._choice(self._echo, None, None)] if self._echo else []

    def chunks(self, delta: Delta) -> list[Json]:
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return []
        return [self._choice(delta.text, delta.logprobs, delta.finish_reason)]

    def whole(self, completion: Completion) -> Json:
        text = self._echo + completion.text
        return self._choice(text, completion.logprobs, completion.finish_reason)

    def _choice(
        self,
        text: str,
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: str | None,
    ) -> Json:
        written = None if logprobs is None else self._logprobs(logprobs)
        return {"text": text, "logprobs": written, "finish_reason": finish_reason}

    def _logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> Json:
        texts = [self._texts[one.token] for one in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        tops = [
            {self._texts[token]: _finite(value) for token, value in reversed(one.top)} or None
            for one in logprobs
        ]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [_best_first(top) for top in tops],
            "text_offset": offsets,
        }


Choice = ChatChoice | TextChoice


def _json(document: Json) -> bytes:
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def _best_first(top: dict[str, float] | None) -> dict[str, float] | None:
    # Written worst first: of tokens with the same text the likeliest one stays.
    return None if top is None else dict(sorted(top.items(), key=lambda item: -item[1]))


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI writes -9999.0 for what cannot come.
    return max(logprob, -9999.0)


def _piece_delta(piece: Piece) -> Json:
    return {"content": piece} if isinstance(piece, str) else {"tool_calls": [_call(piece)]}


def _call(piece: CallPiece) -> Json:
    function: Json = {"arguments": piece.arguments}
    if piece.call_id is None:
        return {"index": piece.index, "function": function}
    function = {"name": piece.name, **function}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}


def _whole_calls(pieces: list[Piece]) -> list[Json]:
    calls: list[Json] = []
    for piece in pieces:
        if isinstance(piece, str):
            continue
        if piece.call_id is not None:
            call = _call(piece)
            del call["index"]
            calls.append(call)
        else:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls

"""Answers in OpenAI's words: whole bodies, and the chunks of a stream."""

import copy
import time
from collections.abc import Callable
from typing import Any, Protocol

from octavo.serving.engine.request import Completion, Delta, TokenLogprobs, Usage
from octavo.serving.server.message_reader import CallPiece, MessageReader, Piece

Json = dict[str, Any]


class TokenTexts:
    """The text of single tokens, for logprobs; half a character is shown as U+FFFD."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # the event loop's own
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._tokenizer.decode([token])
        return self._known[token]

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


class Writer(Protocol):
    """One request's answer; a writer is used once."""

    def opening(self) -> list[Json]:
        """What a stream begins with."""

    def chunks(self, delta: Delta) -> list[Json]:
        """What a stream adds for a delta."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk after the last one, for those who asked for it."""

    def body(self, completion: Completion) -> Json:
        """The whole answer at once."""


class _Envelope:
    def __init__(self, answer_id: str, kind: str, model: str) -> None:
        self._fields = {"id": answer_id, "created": int(time.time()), "model": model}
        self._kind = kind

    def whole(self, choice: Json, usage: Usage) -> Json:
        choice = {"index": 0, **choice}
        usage_fields = usage_body(usage)
        return {**self._fields, "object": self._kind, "choices": [choice], "usage": usage_fields}

    def chunk(self, choices: list[Json], usage: Usage | None = None) -> Json:
        kind = "chat.completion.chunk" if self._kind == "chat.completion" else self._kind
        choices = [{"index": 0, **choice} for choice in choices]
        body = {**self._fields, "object": kind, "choices": choices}
        return body if usage is None else {**body, "usage": usage_body(usage)}


class ChatWriter:
    """chat.completion and chat.completion.chunk."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        texts: TokenTexts,
        make_reader: Callable[[], MessageReader],
    ) -> None:
        self._envelope = _Envelope(answer_id, "chat.completion", model)
        self._texts = texts
        self._reader = make_reader()

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(delta)]

    def chunks(self, delta: Delta) -> list[Json]:
        pieces = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        found = [self._chunk(_piece_delta(piece)) for piece in pieces]
        if delta.logprobs:
            # They belong to the tokens of this step; text that waits for more comes without.
            found = found or [self._chunk({})]
            found[0]["choices"][0]["logprobs"] = self._logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            found.append(self._chunk({}, self._finish_reason(delta.finish_reason)))
        return found

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope.chunk([], usage)

    def body(self, completion: Completion) -> Json:
        pieces = self._reader.feed(completion.text) + self._reader.finish()
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = _whole_calls(pieces)
        if content or not calls:
            message["content"] = content
        if calls:
            message["tool_calls"] = calls
        logprobs = completion.logprobs
        choice = {
            "message": message,
            "logprobs": None if logprobs is None else self._logprobs(logprobs),
            "finish_reason": self._finish_reason(completion.finish_reason),
        }
        return self._envelope.whole(choice, completion.usage)

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        choice = {"delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._envelope.chunk([choice])

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


class CompletionWriter:
    """text_completion, whole and in chunks."""

    def __init__(self, answer_id: str, model: str, texts: TokenTexts) -> None:
        self._envelope = _Envelope(answer_id, "text_completion", model)
        self._texts = texts
        self._offset = 0

    def opening(self) -> list[Json]:
        return []

    def chunks(self, delta: Delta) -> list[Json]:
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return []
        choice = self._choice(delta.text, delta.logprobs, delta.finish_reason)
        return [self._envelope.chunk([choice])]

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope.chunk([], usage)

    def body(self, completion: Completion) -> Json:
        choice = self._choice(completion.text, completion.logprobs, completion.finish_reason)
        return self._envelope.whole(choice, completion.usage)

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

"""Answers in OpenAI's words: content and tool calls, in whole bodies or the chunks of a stream."""

import copy
import itertools
import json
import time
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

from octavo.serving.engine.request import Completion, Delta, Request, TokenLogprobs, Usage
from octavo.serving.engine.text import num_undecided

Json = dict[str, Any]
AnswerKind = Literal["chat.completion", "text_completion"]
OPENING, CLOSING = "<tool_call>", "</tool_call>"
TokenText = Callable[[int], str]
# Content, or a part of a tool call as a stream has it; the first one of a call has its id and name.
Piece = str | Json


class MessageReader:
    """Reads an answer's text as it comes; here all of it is content.

    finish_reason: what a finished answer says in place of stop.
    """

    finish_reason: Literal["stop", "tool_calls"] = "stop"

    def feed(self, text: str, *, is_last: bool) -> list[Piece]:
        """The pieces that are known with this text; is_last: no more of it will come."""
        return [text] if text else []


class NamedCallReader(MessageReader):
    """All of it is the arguments of one function, as guided decoding has made it."""

    def __init__(self, name: str, finish_reason: Literal["stop", "tool_calls"]) -> None:
        self.finish_reason = finish_reason
        self._name = name
        self._is_started = False

    def feed(self, text: str, *, is_last: bool) -> list[Piece]:
        if self._is_started:
            return [{"index": 0, "function": {"arguments": text}}] if text else []
        self._is_started = True
        return [_new_call(0, self._name, text)]


class AnyCallReader(MessageReader):
    """{"name": …, "arguments": …}, as guided decoding has made it; known when it is complete.

    One that was cut off stays content: nobody can tell what it would have called.
    """

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str, *, is_last: bool) -> list[Piece]:
        self._text += text
        if not is_last:
            return []
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

    def feed(self, text: str, *, is_last: bool) -> list[Piece]:
        text = self._text + text
        pieces: list[Piece] = []
        while True:
            before, tag, rest = text.partition(OPENING)
            inside, end, after = rest.partition(CLOSING)
            if not end:
                break
            pieces += self._content(before) + self._call_or_content(inside)
            text = after
        num_held = len(tag + rest) or num_undecided(text, [OPENING])
        shown, self._text = text[: len(text) - num_held], text[len(text) - num_held :]
        pieces += self._content(shown)
        if not is_last:
            return pieces
        # Models may end instead of closing the last tag.
        inside = self._text.removeprefix(OPENING)
        if inside != self._text and parse_call(inside, 0) is not None:
            return pieces + self._call_or_content(inside)
        return pieces + self._content(self._text)

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


def _new_call(index: int, name: str, arguments: str) -> Json:
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": call_id, "type": "function", "function": function}


def parse_call(text: str, index: int) -> Json | None:
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
    return _new_call(index, call["name"], json.dumps(arguments, ensure_ascii=False))


def token_texts(tokenizer: Any) -> TokenText:
    """Tells the text of single tokens, for logprobs; half a character is shown as U+FFFD.

    What it has told once, any thread may ask again.
    """
    own = copy.deepcopy(tokenizer)  # of the event loop
    return cache(lambda token: own.decode([token]))


class Job:
    """What one HTTP request asks of the engine, and how its answer is written; used once.

    kind: OpenAI's name of the answer. choices: by the engine's request, in the order of their
    index; num_per_prompt of them in a row answer the same prompt.
    """

    def __init__(
        self,
        kind: AnswerKind,
        model: str,
        requests: Sequence[Request],
        choices: Sequence["ChatChoice | TextChoice"],
        *,
        num_per_prompt: int,
        has_usage_chunk: bool,
    ) -> None:
        self.requests, self.has_usage_chunk = requests, has_usage_chunk
        self.answer_id = requests[0].request_id
        self._kind = kind
        self._chunk_kind = "chat.completion.chunk" if kind == "chat.completion" else kind
        self._fields = {"id": self.answer_id, "created": int(time.time()), "model": model}
        self._choices = choices
        self._indices = {one.request_id: index for index, one in enumerate(requests)}
        self._num_per_prompt = num_per_prompt
        self._usages = [Usage(prompt_tokens=0, completion_tokens=0)] * len(choices)

    @property
    def is_small(self) -> bool:
        """Whether the whole answer is written in no time; thousands of logprobs take a second."""
        return len(self.requests) < 8 and self.requests[0].sampling.logprobs is None

    def note(self, delta: Delta) -> None:
        """Note the tokens of a choice so far."""
        self._usages[self._indices[delta.request_id]] = delta.usage

    def usage(self) -> Usage:
        """The tokens of all choices so far, each prompt counted once."""
        prompts = self._usages[:: self._num_per_prompt]
        return Usage(
            prompt_tokens=sum(one.prompt_tokens for one in prompts),
            completion_tokens=sum(one.completion_tokens for one in self._usages),
            cached_tokens=sum(one.cached_tokens for one in prompts),
        )

    def _usage_body(self) -> Json:
        usage = self.usage()
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }

    def opening(self) -> list[Json]:
        """What a stream begins with."""
        found = [choice.opening() for choice in self._choices]
        return [self._chunk(index, part) for index, part in enumerate(found) if part is not None]

    def chunks(self, delta: Delta) -> list[Json]:
        """What a stream adds for a delta."""
        index = self._indices[delta.request_id]
        return [self._chunk(index, part) for part in self._choices[index].chunks(delta)]

    def usage_chunk(self) -> Json:
        """The chunk after the last one, for those who asked for it."""
        usage = self._usage_body()
        return {**self._fields, "object": self._chunk_kind, "choices": [], "usage": usage}

    def content(self, completions: Sequence[Completion]) -> bytes:
        """The whole answer at once, as JSON; any thread may call it.

        Choice by choice: the encoder of a large document lets no other thread run.
        """
        fields = {**self._fields, "object": self._kind, "usage": self._usage_body()}
        both = zip(self._choices, completions, strict=True)
        choices = [_json({"index": i, **choice.whole(one)}) for i, (choice, one) in enumerate(both)]
        return b'%s, "choices": [%s]}' % (_json(fields)[:-1], b", ".join(choices))

    def _chunk(self, index: int, part: Json) -> Json:
        choices = [{"index": index, **part}]
        return {**self._fields, "object": self._chunk_kind, "choices": choices}


class ChatChoice:
    """A choice of chat.completion and chat.completion.chunk; like any other it is written once."""

    def __init__(self, text_of: TokenText, reader: MessageReader) -> None:
        self._text_of, self._reader = text_of, reader

    def opening(self) -> Json | None:
        """What a stream begins with."""
        return self._part({"role": "assistant", "content": ""})

    def chunks(self, delta: Delta) -> list[Json]:
        """What a stream adds for a delta."""
        pieces = self._reader.feed(delta.text, is_last=delta.finish_reason is not None)
        found = [
            self._part({"content": one} if isinstance(one, str) else {"tool_calls": [one]})
            for one in pieces
        ]
        if delta.logprobs:
            # They belong to the tokens of this step; text that waits for more comes without.
            found = found or [self._part({})]
            found[0]["logprobs"] = self._logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            found.append(self._part({}, self._finish_reason(delta.finish_reason)))
        return found

    def whole(self, completion: Completion) -> Json:
        """The whole choice at once."""
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        calls: list[Json] = []
        content = ""
        for piece in self._reader.feed(completion.text, is_last=True):
            if isinstance(piece, str):
                content += piece
            elif "id" in piece:
                calls.append({key: value for key, value in piece.items() if key != "index"})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        if content or not calls:
            message["content"] = content
        if calls:
            message["tool_calls"] = calls
        return {
            "message": message,
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": self._finish_reason(completion.finish_reason),
        }

    def _part(self, delta: Json, finish_reason: str | None = None) -> Json:
        return {"delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _finish_reason(self, of_engine: str) -> str:
        return self._reader.finish_reason if of_engine == "stop" else of_engine

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        content = [
            {
                **self._token(one.token, one.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        text = self._text_of(token)
        # A part of a character has no text of its own.
        utf8 = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": utf8}


class TextChoice:
    """A choice of text_completion, whole and in chunks.

    echo: the prompt's text if the answer is to begin with it.
    """

    def __init__(self, text_of: TokenText, echo: str = "") -> None:
        self._text_of, self._echo = text_of, echo
        self._offset = 0

    def opening(self) -> Json | None:
        return self._choice(self._echo, None, None) if self._echo else None

    def chunks(self, delta: Delta) -> list[Json]:
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return []
        return [self._choice(delta.text, delta.logprobs, delta.finish_reason)]

    def whole(self, completion: Completion) -> Json:
        text = self._echo + completion.text
        return self._choice(text, completion.logprobs, completion.finish_reason)

    def _choice(
        self, text: str, logprobs: Sequence[TokenLogprobs] | None, finish_reason: str | None
    ) -> Json:
        return {"text": text, "logprobs": self._logprobs(logprobs), "finish_reason": finish_reason}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        texts = [self._text_of(one.token) for one in logprobs]
        offsets = list(itertools.accumulate(map(len, texts), initial=self._offset))
        self._offset = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [self._top(one.top) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, top: Sequence[tuple[int, float]]) -> dict[str, float] | None:
        # Written worst first: of tokens with the same text the likeliest one stays.
        found = {self._text_of(token): _finite(value) for token, value in reversed(top)}
        return dict(sorted(found.items(), key=lambda item: -item[1])) or None


def _json(document: Json) -> bytes:
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI writes -9999.0 for what cannot come.
    return max(logprob, -9999.0)

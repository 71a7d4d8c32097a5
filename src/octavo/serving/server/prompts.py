"""Messages and prompts to tokens, in a thread or a process with a tokenizer of its own."""

import copy
import json
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from octavo.brief import brief
from octavo.errors import ConfigError
from octavo.integrations.transformers.tokenizer import chat_text, text_tokens
from octavo.serving.server.api_error import ApiError, bad_request
from octavo.serving.server.schema import CompletionRequest, ImagePart, Message, TextPart, Tool

logger = logging.getLogger(__name__)

IGNORED_TOOLS = (
    "the model's chat template leaves out tools, so the model would not see them: start the server "
    "with a --chat-template that writes them, or describe them in a message in place of tools"
)
MAX_DEPTH = 100  # of a tool's parameters or any other JSON schema


class Prompts:
    """What the tokenizer and its chat template make of requests.

    The tokenizer is a copy: transformers' fast tokenizers cannot be used by two threads at once,
    and the engine has one too.
    """

    def __init__(self, tokenizer: Any, max_context: int) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self.vocab_size = len(tokenizer)
        self._max_context = max_context
        self.max_chars = max_context * _longest_token(tokenizer)
        self._has_warned = False

    def check_length(self, num_chars: int, param: str) -> None:
        """ApiError for a text that cannot fit the context, whatever its tokens are."""
        if num_chars > self.max_chars:
            raise self._too_long(num_chars, param)

    def _too_long(self, num_chars: int, param: str) -> ApiError:
        return bad_request(
            f"This model's maximum context length is {self._max_context} tokens, which the "
            f"{num_chars:,} characters of this prompt exceed",
            param,
            "context_length_exceeded",
        )

    def of_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        is_forced: bool = False,
    ) -> tuple[int, ...]:
        """The tokens of a conversation; each image is one place in it.

        Tools that the chat template leaves out are refused, unless a call is forced: the grammar
        knows them, then.
        """
        keeps_parts = bool(image_urls(messages))
        written = [_written(message, keeps_parts=keeps_parts) for message in messages]
        write = partial(
            chat_text, self._tokenizer, written, add_generation_prompt=add_generation_prompt
        )
        try:
            text = write(tools=[tool.model_dump(exclude_none=True) for tool in tools])
        except ConfigError as error:
            raise bad_request(str(error), "messages") from None
        if tools and _makes(write, text):
            if not is_forced:
                raise bad_request(IGNORED_TOOLS, "tools", "tools_not_supported")
            if not self._has_warned:
                logger.warning("a call is forced by its schema alone: %s", IGNORED_TOOLS)
                self._has_warned = True
        return self.encode(text, add_special_tokens=False, param="messages")

    def of_completion(self, prompt: str | list[int]) -> tuple[int, ...]:
        """The tokens of a prompt: a text, or tokens."""
        if isinstance(prompt, str):
            return self.encode(prompt, param="prompt")
        return self.check_tokens(prompt, "prompt")

    def encode(self, text: str, *, param: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The tokens of a text; ApiError for what is not text, or cannot fit the context."""
        self.check_length(len(text), param)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad_request("expected text, got half of a surrogate pair", param) from None
        # The beginning of a long text shows that it does not fit, by a wide margin.
        num_first = 10 * self._max_context
        if len(text) > num_first:
            first = text_tokens(self._tokenizer, text[:num_first])
            if len(first) > 1.5 * self._max_context:
                raise self._too_long(len(text), param)
        return text_tokens(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def check_tokens(self, tokens: Sequence[int], param: str) -> tuple[int, ...]:
        """The tokens, if the model has them all."""
        if unknown := next((token for token in tokens if token >= self.vocab_size), None):
            message = f"expected token ids below {self.vocab_size}, got {unknown}"
            raise bad_request(message, param)
        return tuple(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        text: str = self._tokenizer.decode(self.check_tokens(tokens, "tokens"))
        return text


def _makes(write: Callable[[], str], text: str) -> bool:
    """Whether a conversation without its tools is this text as well."""
    try:
        return write() == text
    except ConfigError:  # without tools it cannot be written at all
        return False


def _longest_token(tokenizer: Any) -> float:
    """The most characters that one token can stand for; infinity if nobody can tell."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return math.inf
    # Other models make one unknown token of a long word, or of a run of unknown characters.
    if type(backend.model).__name__ != "BPE" or backend.model.fuse_unk:
        return math.inf
    longest = max(map(len, tokenizer.get_vocab()))
    # Normalizers may join characters: NFC and NFKC make one of up to four.
    return longest if backend.normalizer is None else 4 * longest


def listed_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request, which may be one or a list of them."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


def image_urls(messages: Sequence[Message]) -> list[str]:
    """The addresses of all images in a conversation, in order."""
    parts = [part for message in messages for part in message.parts]
    return [part.image_url.url for part in parts if isinstance(part, ImagePart)]


def chat_size(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """About how many characters a chat template looks at; ApiError if it cannot write the tools."""
    size = sum(64 + message.num_chars for message in messages)
    for tool in tools:
        num_chars, _, depth = json_size(tool.function.parameters or {})
        if depth > MAX_DEPTH:
            raise bad_request(f"expected parameters of at most {MAX_DEPTH} levels", "tools")
        size += num_chars + len(tool.function.description or "")
    return size


def json_size(value: Any) -> tuple[int, int, int]:
    """(characters, about; properties that schemas in it declare; levels) of a JSON value."""
    num_chars = num_properties = depth = 0
    level = [value]
    while level:
        below: list[Any] = []
        for one in level:
            match one:
                case dict():
                    num_chars += sum(map(len, one)) + 6 * len(one)
                    properties = one.get("properties")
                    num_properties += len(properties) if isinstance(properties, dict) else 0
                    below += one.values()
                case list():
                    num_chars += 2 * len(one)
                    below += one
                case str():
                    num_chars += len(one) + 2
                case _:
                    num_chars += 4
        level, depth = below, depth + 1
    return num_chars, num_properties, depth


def _written(message: Message, *, keeps_parts: bool) -> dict[str, Any]:
    """A message as chat templates read it."""
    written = message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    # Templates know no developer; OpenAI's name for system messages.
    written["role"] = "system" if message.role == "developer" else message.role
    written["content"] = message.text
    if keeps_parts:
        written["content"] = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.parts
        ]
    for call in message.tool_calls or ():
        # Templates write arguments as JSON themselves, so they want the object.
        try:
            arguments = json.loads(call.function.arguments)
        except (ValueError, RecursionError):
            got = brief(call.function.arguments)
            expected = "expected the arguments of a tool call as JSON"
            raise bad_request(f"{expected}, got {got}", "messages") from None
        function = {"name": call.function.name, "arguments": arguments}
        calls = written.setdefault("tool_calls", [])
        calls.append({"id": call.id, "type": "function", "function": function})
    return written

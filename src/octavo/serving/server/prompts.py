"""Messages and prompts to tokens; runs in a thread of its own, with its own tokenizer."""

import copy
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from octavo.brief import brief
from octavo.errors import ConfigError
from octavo.integrations.transformers.tokenizer import chat_text, text_tokens
from octavo.serving.server.api_error import bad_request
from octavo.serving.server.schema import CompletionRequest, ImagePart, Message, TextPart, Tool

logger = logging.getLogger(__name__)

IGNORED_TOOLS = (
    "the model's chat template leaves out tools, so the model would not see them: start the server "
    "with a --chat-template that writes them, or describe them in a message in place of tools"
)


class Prompts:
    """What the tokenizer and its chat template make of requests.

    The tokenizer is a copy: transformers' fast tokenizers cannot be used by two threads at once,
    and the engine has one too.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self.vocab_size = len(tokenizer)
        self._has_warned = False

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
        given = [tool.model_dump(exclude_none=True) for tool in tools]
        write = partial(
            chat_text, self._tokenizer, written, add_generation_prompt=add_generation_prompt
        )
        try:
            text = write(tools=given)
        except ConfigError as error:
            raise bad_request(str(error), "messages") from None
        if tools and not self._is_changed(text, write):
            if not is_forced:
                raise bad_request(IGNORED_TOOLS, "tools", "tools_not_supported")
            self._warn_of_tools()
        return self.encode(text, add_special_tokens=False, param="messages")

    @staticmethod
    def _is_changed(text: str, write: Callable[[], str]) -> bool:
        """Whether tools have made a difference to the prompt."""
        try:
            return write() != text
        except ConfigError:  # without tools it cannot be written at all
            return True

    def _warn_of_tools(self) -> None:
        if not self._has_warned:
            logger.warning("a call is forced by its schema alone: %s", IGNORED_TOOLS)
            self._has_warned = True

    def of_completion(self, prompt: str | list[int]) -> tuple[int, ...]:
        """The tokens of a prompt: a text, or tokens."""
        if isinstance(prompt, str):
            return self.encode(prompt, param="prompt")
        return self.check_tokens(prompt, "prompt")

    def encode(self, text: str, *, param: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The tokens of a text; ApiError for what is not text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad_request("expected text, got half of a surrogate pair", param) from None
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


def listed_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request, which may be one or a list of them."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


def image_urls(messages: Sequence[Message]) -> list[str]:
    """The addresses of all images in a conversation, in order."""
    return [
        part.image_url.url
        for message in messages
        for part in (message.content if isinstance(message.content, list) else ())
        if isinstance(part, ImagePart)
    ]


def _written(message: Message, *, keeps_parts: bool) -> dict[str, Any]:
    """A message as chat templates read it."""
    # Templates know no developer; OpenAI's name for system messages.
    role = "system" if message.role == "developer" else message.role
    written: dict[str, Any] = {"role": role, "content": _content(message, keeps_parts)}
    if message.name is not None:
        written["name"] = message.name
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return written


def _content(message: Message, keeps_parts: bool) -> str | list[dict[str, str]]:
    content = message.content or ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if keeps_parts else content
    if keeps_parts:
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in content
        ]
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _arguments(text: str) -> Any:
    # Templates write arguments as JSON themselves, so they want the object.
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        message = f"expected the arguments of a tool call as JSON, got {brief(text)}"
        raise bad_request(message, "messages") from None

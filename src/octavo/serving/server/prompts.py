"""Messages and prompts to tokens; runs in a thread of its own, with its own tokenizer."""

import copy
import json
from collections.abc import Sequence
from typing import Any

from octavo.brief import brief
from octavo.serving.server.api_error import bad_request
from octavo.serving.server.schema import CompletionRequest, ImagePart, Message, TextPart, Tool


class Prompts:
    """What the tokenizer and its chat template make of requests.

    The tokenizer is a copy: transformers' fast tokenizers cannot be used by two threads at once,
    and the engine has one too.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self.vocab_size = len(tokenizer)

    def of_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """The tokens of a conversation; each image is one place in it."""
        keeps_parts = bool(image_urls(messages))
        written = [_written(message, keeps_parts=keeps_parts) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                written,
                tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        # A template raises what its author thought of, and what its code runs into.
        except Exception as error:
            reason = f"{type(error).__name__}: {brief(str(error))}"
            message = f"the model's chat template does not take these messages: {reason}"
            raise bad_request(message, "messages") from None
        return self.encode(text, add_special_tokens=False, param="messages")

    def of_completion(self, body: CompletionRequest) -> tuple[int, ...]:
        """The tokens of a prompt: a text, tokens, or a list of one of them."""
        prompt: Any = body.prompt
        if isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int)):
            if len(prompt) != 1:
                message = f"expected one prompt, got {len(prompt)}: send a request for each"
                raise bad_request(message, "prompt")
            (prompt,) = prompt
        if isinstance(prompt, str):
            return self.encode(prompt, param="prompt")
        return self.check_tokens(prompt, "prompt")

    def encode(self, text: str, *, param: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The tokens of a text; ApiError for what is not text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad_request("expected text, got half of a surrogate pair", param) from None
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

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

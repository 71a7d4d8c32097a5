"""Messages as the tokens of a tokenizer's chat template."""

from collections.abc import Sequence
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError
from octavo.measure.evaluate.endpoint import Message


def chat_tokens(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """The prompt that asks for an answer to these messages."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("expected a tokenizer with a chat template, got one without")
    try:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # jinja2's kinds, and whatever a template itself raises
        raise CheckpointError(
            f"expected messages that the chat template takes: {brief(str(error))}"
        ) from error
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

"""A tokenizer without its model."""

from collections.abc import Callable
from typing import Any

from octavo.integrations.transformers.load import loading


def token_counter(name: str) -> Callable[[str], int]:
    """How many tokens a text has, by the tokenizer in this folder or of this hub name."""
    from transformers import AutoTokenizer

    tokenizers: Any = AutoTokenizer
    with loading(name, "a tokenizer"):
        tokenizer = tokenizers.from_pretrained(name, trust_remote_code=False)
    return lambda text: len(tokenizer(text).input_ids)

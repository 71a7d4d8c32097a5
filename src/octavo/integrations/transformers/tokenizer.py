"""A tokenizer without its model."""

from collections.abc import Callable
from typing import Any

from octavo.integrations.transformers.gguf_file import tokenizer_source
from octavo.integrations.transformers.load import loading


def token_counter(name: str) -> Callable[[str], int]:
    """How many tokens a text has, by the tokenizer in this folder or of this hub name."""
    from transformers import AutoTokenizer

    tokenizers: Any = AutoTokenizer
    source, options = tokenizer_source(name)
    with loading(name, "a tokenizer"):
        tokenizer = tokenizers.from_pretrained(source, **options)
    return lambda text: len(tokenizer(text).input_ids)

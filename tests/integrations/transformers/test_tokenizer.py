"""Counting tokens without a model."""

import pytest

from octavo.errors import CheckpointError
from octavo.integrations.transformers.tokenizer import token_counter

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def test_tokens_of_a_text(tmp_path):
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    count = token_counter(str(tmp_path))
    assert (count("a b b"), count("a"), count("")) == (3, 1, 0)


def test_a_folder_without_one(tmp_path):
    with pytest.raises(CheckpointError, match="expected a tokenizer"):
        token_counter(str(tmp_path))

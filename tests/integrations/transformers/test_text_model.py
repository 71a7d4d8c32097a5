"""Text models: windows of a text, and what cannot be loaded."""

import pytest
import torch

pytest.importorskip("transformers")

from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.transformers.text_model import (
    CHARACTERS_PER_TOKEN,
    TextModel,
    load_text_model,
    read_text,
)
from octavo_testkit.models.text_models import make_decoder, save_decoder


class Letters:
    """A tokenizer with a token for each letter, and one before the first if has_bos."""

    bos_token_id = 7

    def __init__(self, has_bos=False):
        self.has_bos = has_bos
        self.lengths = []

    def __call__(self, text, add_special_tokens=True, verbose=True):
        self.lengths.append(len(text))
        start = [7] if self.has_bos and add_special_tokens else []
        return {"input_ids": start + [ord(letter) for letter in text]}


def test_windows_do_not_overlap_and_go_on_where_others_end():
    model = TextModel("letters", None, Letters())
    text = "abcdefghijklm"
    found = ["".join(map(chr, window.tolist())) for window in model.windows(text, 4, 3)]
    assert found == ["abcd", "efgh", "ijkl"]
    assert model.windows(text, 4, 1, start=2)[0].tolist() == list(map(ord, "ijkl"))
    with pytest.raises(ConfigError, match="16 tokens or more for 4 windows of 4, got 13"):
        model.windows(text, 4, 1, start=3)
    with pytest.raises(ConfigError, match="got 0"):
        model.windows("", 2, 1)
    with pytest.raises(ConfigError, match="2 tokens or more"):
        model.windows(text, 1, 1)


def test_every_window_starts_as_the_tokenizer_starts_texts():
    model = TextModel("letters", None, Letters(has_bos=True))
    windows = model.windows("abcdef", 3, 3)
    assert [window.tolist() for window in windows] == [[7, 97, 98], [7, 99, 100], [7, 101, 102]]


def test_only_a_piece_of_a_long_text_is_tokenized():
    letters = Letters()
    TextModel("letters", None, letters).windows("a" * 1000, 4, 2)
    assert max(letters.lengths) == 8 * CHARACTERS_PER_TOKEN

    class Paragraphs(Letters):
        def __call__(self, text, **options):
            return super().__call__(text[::20], **options)

    assert len(TextModel("long tokens", None, Paragraphs()).windows("a" * 1000, 4, 2)) == 2


def test_a_folder_is_loaded_in_its_own_dtype(tmp_path):
    model = make_decoder("llama", torch.bfloat16, vocab_size=258)
    save_decoder(tmp_path, model, has_bos=False, num_tokens=258)
    loaded = load_text_model(str(tmp_path))
    assert loaded.dtype == "bf16" and loaded.max_length == 1024
    assert load_text_model(str(tmp_path), dtype="float32").dtype == "float32"
    windows = loaded.windows("Grüße, octavo", 5, 3)  # ü and ß are two bytes each
    assert loaded.tokenizer.decode(torch.cat(windows)) == "Grüße, octavo"


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("nowhere", {}, CheckpointError, "expected a model's config.json"),
        ("nowhere", {"dtype": "int8"}, ConfigError, "got 'int8'"),
    ],
)
def test_what_cannot_be_loaded(tmp_path, monkeypatch, name, options, error, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(error, match=message):
        load_text_model(str(tmp_path / name), **options)


def test_a_text_is_in_utf_8(tmp_path):
    (tmp_path / "a").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(CheckpointError, match="expected a text in UTF-8"):
        read_text(tmp_path / "a")
    with pytest.raises(CheckpointError, match="expected a text file: No such file"):
        read_text(tmp_path / "b")
    (tmp_path / "c").write_text("Grüße", "utf-8")
    assert read_text(tmp_path / "c") == "Grüße"


def test_the_first_window_is_as_long_as_the_text_or_the_limit():
    model = TextModel("letters", None, Letters(has_bos=True))
    assert model.first_window("abcdef", 3).tolist() == [7, 97, 98]
    assert model.first_window("ab", 100).tolist() == [7, 97, 98]
    with pytest.raises(ConfigError, match="got an empty one"):
        model.first_window("", 100)

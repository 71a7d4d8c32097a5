"""Windows of tokens: consecutive, behind BOS, the same every time; chats by their template."""

import json

import pytest

from octavo import ConfigError
from octavo.calibration import data as data_module
from octavo.calibration.data import open_texts

pytest.importorskip("transformers")
from octavo.integrations.transformers.text_model import cut_windows
from octavo_testkit.models import text_models

TEXT = "\n".join(text_models.SENTENCES) + "\n"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def tokenizer():
    return text_models.make_tokenizer()


def open_content(tmp_path, content, name="a.txt"):
    (tmp_path / name).write_text(content)
    return open_texts(str(tmp_path / name))


def windows(data, num_windows=1000, start=0):
    return list(data.prompts(num_windows, start=start))


@pytest.mark.parametrize("piece_size", [16, 2**16])
def test_a_text_is_cut_without_loss(tmp_path, tokenizer, monkeypatch, piece_size):
    monkeypatch.setattr(data_module, "_PIECE_SIZE", piece_size)
    found = windows(cut_windows(open_content(tmp_path, TEXT), tokenizer, 10))
    assert {len(window) for window in found[:-1]} == {10} and 1 < len(found[-1]) <= 10
    assert all(window[0] == tokenizer.bos_token_id for window in found)
    rest = [token for window in found for token in window[1:]]
    assert tokenizer.bos_token_id not in rest
    assert tokenizer.decode(rest) == TEXT


def test_a_tokenizer_without_bos(tmp_path):
    tokenizer = text_models.make_tokenizer(has_bos=False)
    found = windows(cut_windows(open_content(tmp_path, TEXT), tokenizer, 10))
    assert tokenizer.decode([token for window in found for token in window]) == TEXT


def test_windows_from_one_on_are_the_same(tmp_path, tokenizer):
    data = cut_windows(open_content(tmp_path, TEXT), tokenizer, 7)
    everything = windows(data)
    assert windows(data, start=3) == everything[3:]
    assert windows(data, num_windows=5, start=3) == everything[3:5]
    assert data.num_prompts is None


def test_other_lengths_have_another_fingerprint(tmp_path, tokenizer):
    texts = open_content(tmp_path, TEXT)
    assert len({cut_windows(texts, tokenizer, n).fingerprint for n in (7, 8)}) == 2


def test_rows_do_not_share_windows(tmp_path, tokenizer):
    rows = "\n".join(json.dumps({"text": text}) for text in ("a", "", "b"))
    found = windows(cut_windows(open_content(tmp_path, rows, "a.jsonl"), tokenizer, 10))
    assert [tokenizer.decode(window) for window in found] == ["<s>a", "<s>b"]


def test_chats_go_through_the_template_and_are_cut(tmp_path, tokenizer):
    data = open_content(tmp_path, json.dumps(CHAT), "a.jsonl")
    (window,) = windows(cut_windows(data, tokenizer, 100))
    assert tokenizer.decode(window) == "<|user|>Hi\n<|assistant|>Hello\n"  # BOS is the template's
    (cut,) = windows(cut_windows(data, tokenizer, 5))
    assert cut == window[:5]


def test_chats_without_a_template(tmp_path):
    tokenizer = text_models.make_tokenizer(chat_template=None)
    data = open_content(tmp_path, json.dumps(CHAT), "a.jsonl")
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the model has no chat temp"):
        windows(cut_windows(data, tokenizer, 100))


def test_a_chat_that_the_template_refuses(tmp_path, tokenizer):
    rows = json.dumps(CHAT) + "\n" + json.dumps([{"role": "banned", "content": "x"}])
    data = cut_windows(open_content(tmp_path, rows, "a.jsonl"), tokenizer, 100)
    with pytest.raises(ConfigError, match=":2: the chat template does not .*no such role"):
        windows(data)


def test_an_empty_text_has_no_windows(tmp_path, tokenizer):
    assert windows(cut_windows(open_content(tmp_path, ""), tokenizer, 10)) == []


def test_windows_too_short_for_a_token(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="expected max_length from 2 on, got 1"):
        cut_windows(open_content(tmp_path, TEXT), tokenizer, 1)

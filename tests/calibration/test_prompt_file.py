"""Prompts from files."""

import pytest

from octavo import CheckpointError, ConfigError
from octavo.calibration.data import read_prompts


def test_lines_and_rows(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n  zwei Bären \n", "utf-8")
    assert read_prompts(path) == ["a cat", "zwei Bären"]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "a cat", "seed": 3}\n"a dog"\n')
    assert read_prompts(rows) == ["a cat", "a dog"]


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("a.txt", b" \n", ConfigError, "expected prompts, one in a line, got none"),
        ("a.txt", b"\xff\xfe", CheckpointError, "expected text in UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n', CheckpointError, ":1: expected a text"),
        ("a.jsonl", b'{"prompt": " "}\n', CheckpointError, ":1: expected a text"),
        ("a.jsonl", b"{", CheckpointError, ":1: expected JSON"),
    ],
)
def test_what_is_no_file_of_prompts(tmp_path, name, content, error, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(error, match=said):
        read_prompts(path)
    with pytest.raises(ConfigError, match="got none at"):
        read_prompts(tmp_path / "gone.txt")

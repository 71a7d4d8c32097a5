"""Documents from files, rows, folders and data sets, and what is said of those that are none."""

import json

import pytest

from octavo import CheckpointError, ConfigError
from octavo.calibration import data as data_module
from octavo.calibration.data import Chat, Passage, open_texts

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def write_rows(path, rows):
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def texts(data):
    return ["".join(document.pieces) for document in data.read(0)]


def chats(data):
    return [[dict(message) for message in document.messages] for document in data.read(0)]


@pytest.mark.parametrize("name", ["book.txt", "enwik8", "page.xml"])
def test_a_plain_file_is_one_text(tmp_path, name):
    path = tmp_path / name
    path.write_text("Größe\r\nzwei\n", newline="")
    found = open_texts(str(path))
    assert texts(found) == ["Größe\r\nzwei\n"] == texts(found)  # it can be read again
    assert [type(document) for document in found.read(0)] == [Passage]
    before = found.fingerprint
    path.write_text("longer than before")
    assert open_texts(str(path)).fingerprint != before


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
def test_pieces_are_whole_lines_and_lose_nothing(tmp_path, monkeypatch, size):
    monkeypatch.setattr(data_module, "_PIECE_SIZE", size)
    content = "ab cd\n\nefghijklmno pq\nr\nno end"
    (tmp_path / "a.txt").write_text(content)
    (document,) = open_texts(str(tmp_path / "a.txt")).read(0)
    pieces = list(document.pieces)
    assert "".join(pieces) == content
    if size == 7:
        assert pieces[0] == "ab cd\n\n"


def test_a_large_file_is_read_lazily(tmp_path, monkeypatch):
    monkeypatch.setattr(data_module, "_PIECE_SIZE", 8)
    path = tmp_path / "a.txt"
    path.write_bytes(b"good text\n" * 10_000 + b"\xff")
    (document,) = open_texts(str(path)).read(0)
    assert next(iter(document.pieces))  # the damaged end is not looked at yet
    with pytest.raises(CheckpointError, match=r"a\.txt: expected a text in UTF-8"):
        list(document.pieces)


def test_rows_of_every_form(tmp_path):
    rows = [
        {"text": "plain"},
        {"messages": MESSAGES, "id": 1},
        MESSAGES,
        {"conversations": SHARED, "text": None},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    first, *others = open_texts(path).read(0)
    assert "".join(first.pieces) == "plain"
    assert all(list(chat.messages) == MESSAGES for chat in others)
    assert [chat.where for chat in others] == [f"{path}:{n}" for n in (3, 5, 7)]
    assert all(isinstance(chat, Chat) for chat in others)


def test_content_in_parts_and_other_fields(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    path = write_rows(tmp_path / "a.jsonl", [[{"role": "user", "content": parts}, call]])
    assert chats(open_texts(path)) == [
        [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        ]
    ]


@pytest.mark.parametrize("column", ["text", "messages"])
def test_parquet(tmp_path, column):
    datasets = pytest.importorskip("datasets")
    cells = ["one", "two"] if column == "text" else [MESSAGES, MESSAGES[:1]]
    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_dict({column: cells, "id": [1, 2]}).to_parquet(path)
    found = open_texts(path)
    assert (texts(found) if column == "text" else chats(found)) == cells


def test_a_data_set_by_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"messages": [MESSAGES]}).to_iterable_dataset()
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs["split"]))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = open_texts("org/chats", split="test", subset="small")
    assert chats(found) == [MESSAGES]
    assert asked == [(("org/chats", "small"), "test")]
    assert found.fingerprint == "org/chats small test"


def test_a_folder_in_the_order_of_names(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    write_rows(tmp_path / "c.jsonl", [{"text": "third"}, {"text": "fourth"}])
    (tmp_path / "d.bin").write_bytes(b"\xff")
    (tmp_path / "folder.txt").mkdir()
    found = open_texts(str(tmp_path))
    assert texts(found) == ["first", "second", "third", "fourth"]
    before = found.fingerprint
    (tmp_path / "e.txt").write_text("fifth")
    assert open_texts(str(tmp_path)).fingerprint != before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (3, "expected an object with text, messages or conversations"),
        ({"prompt": "x"}, "expected one of text, messages, conversations, got 'prompt'"),
        ({}, "conversations, got nothing"),
        ({"text": "x", "messages": MESSAGES}, "got 'text', 'messages'"),
        ({"text": 3}, "expected text to be a string, got 3"),
        ({"messages": []}, "expected a list of messages"),
        ({"messages": "hi"}, "expected a list of messages, got 'hi'"),
        (["hi"], "expected a message, got 'hi'"),
        ([{"content": "x"}], "expected a message with role and content"),
        ([{"from": "martian", "value": "x"}], "one of human, user, gpt"),
        ([{"role": "user", "content": [{"type": "image"}]}], "expected the content to be text"),
        ([{"role": "user", "content": 3}], "expected the content to be text, got 3"),
    ],
)
def test_rows_that_are_none(tmp_path, row, message):
    path = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(CheckpointError, match=message) as caught:
        list(open_texts(path).read(0))
    assert f"{path}:1" in str(caught.value)


@pytest.mark.parametrize("name", ["", "./gone", "/gone/text", "gone.txt", "gone.jsonl", "a/b/c"])
def test_neither_a_file_nor_a_name(name):
    with pytest.raises(ConfigError, match="expected a file"):
        open_texts(name)


def test_a_list_in_json_is_refused_with_a_way_out(tmp_path):
    (tmp_path / "chats.json").write_text(json.dumps([MESSAGES]))
    with pytest.raises(ConfigError, match=r"jq -c '\.\[\]' chats\.json > chats\.jsonl"):
        open_texts(str(tmp_path / "chats.json"))


def test_a_folder_without_texts(tmp_path):
    with pytest.raises(ConfigError, match=r"expected texts \(\.jsonl, \.md, \.parquet, \.txt\)"):
        open_texts(str(tmp_path))

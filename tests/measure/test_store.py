"""Append and read JSON Lines: order, crashes, concurrent writers, errors with line numbers."""

import errno
import multiprocessing
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import CheckpointError, ConfigError
from octavo.measure import store
from octavo.measure.records import Machine, Measurement
from octavo.measure.store import TornLineWarning

ROW = Measurement(
    op="quantize",
    impl="reference",
    case={"index": 0},
    values={"sqnr_db": 31.5},
    machine=Machine(cpu="A CPU", python="3.12.1", platform="Linux"),
    command="octavo demo",
    date="2026-01-31T12:00:00Z",
)
ROWS = [replace(ROW, case={"index": index}) for index in range(3)]
LINES = [row.to_json().encode() + b"\n" for row in ROWS]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "rows.jsonl"


def test_rows_come_back_in_order(path):
    store.append(path, ROWS[:1])
    store.append(str(path), iter(ROWS[1:]))
    assert store.read(path) == store.read(str(path)) == ROWS
    assert path.read_bytes() == b"".join(LINES)


def test_appending_nothing_makes_an_empty_file(path):
    store.append(path, [])
    assert store.read(path) == []


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    store.append(tmp_path / "b.jsonl", ROWS[1:])
    store.append(tmp_path / "a.jsonl", ROWS[:1])
    (tmp_path / "notes.txt").write_text("not records")
    assert store.read(tmp_path) == ROWS


def test_blank_lines_are_no_rows(path):
    path.write_bytes(LINES[0] + b"\n  \n" + LINES[1] + b"\r\n")
    assert store.read(path) == ROWS[:2]


@pytest.mark.parametrize("place", ["", "none.jsonl"])
def test_nothing_to_read_is_an_error(tmp_path, place):
    with pytest.raises(CheckpointError, match="found none"):
        store.read(tmp_path / place)


def test_appending_needs_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="expected an existing folder .* create .*none"):
        store.append(tmp_path / "none" / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match="expected an existing folder .* create .*none"):
        store.check_folder(tmp_path / "none" / "rows.jsonl")
    store.check_folder(tmp_path / "rows.jsonl")
    store.check_folder(None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}\n", "schema 1, got None"),
        (LINES[0].replace(b"quantize", b"\xff"), "can't decode byte 0xff"),
        (LINES[0][:-20] + b"\n", "not a line of JSON"),
        (b"hello", "not a line of JSON"),
        (LINES[0].replace(b'"op"', b'"po"'), "unknown key"),
    ],
    ids=str,
)
def test_errors_name_file_and_line(path, line, message):
    path.write_bytes(LINES[0] + b"\n" + line)
    with pytest.raises(CheckpointError, match=rf"rows\.jsonl:3: .*{message}"):
        store.read(path)


def every_tail() -> list[bytes]:
    """What a crash can leave of the third line: any prefix, or zeros where the data never came."""
    whole = LINES[2].rstrip(b"\n")
    prefixes = [whole[:length] for length in (1, 5, len(whole) // 2, len(whole) - 1)]
    return [*prefixes, b"\0" * 7, whole[:30] + b"\0" * 7]


@pytest.mark.parametrize("tail", every_tail(), ids=lambda tail: f"{tail[:4]!r}+{len(tail)}")
def test_a_torn_last_line_is_reported_and_then_repaired(path, tail):
    path.write_bytes(b"".join(LINES[:2]) + tail)
    with pytest.warns(TornLineWarning, match=r"rows\.jsonl:3: the last line is incomplete"):
        assert store.read(path) == ROWS[:2]
    with pytest.warns(TornLineWarning):
        store.append(path, ROWS[2:])
    assert path.read_bytes() == b"".join(LINES)


def test_a_row_that_lacks_only_its_newline_is_kept(path):
    path.write_bytes(b"".join(LINES[:2]).rstrip(b"\n"))
    assert store.read(path) == ROWS[:2]
    store.append(path, ROWS[2:])
    assert store.read(path) == ROWS


def test_appending_leaves_a_file_of_something_else_alone(path):
    path.write_bytes(b"my notes\nand more")
    with pytest.raises(CheckpointError, match=r"rows\.jsonl:2: not a line of JSON"):
        store.append(path, ROWS)
    assert path.read_bytes() == b"my notes\nand more"


class FullDisk:
    """A file that takes `room` bytes and then refuses."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, line):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(line[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_leaves_whole_rows(path):
    with open(path, "a+b", buffering=0) as file:
        full = FullDisk(file, room=len(LINES[0]) + 10)
        store._write_whole(full, LINES[0])
        with pytest.raises(OSError, match="No space"):
            store._write_whole(full, LINES[1])
    assert path.read_bytes() == LINES[0]


def test_short_writes_are_continued(path):
    class Slow(FullDisk):
        def write(self, line):
            return self.file.write(line[:7])

    with open(path, "a+b", buffering=0) as file:
        store._write_whole(Slow(file, 0), LINES[0])
    assert path.read_bytes() == LINES[0]


def append_many(path: Path, writer: int) -> None:
    for index in range(20):
        # Longer than a page: a plain buffered write would arrive in pieces.
        store.append(
            path, [replace(ROW, case={"writer": writer, "index": index}, command="x" * 9000)]
        )


def test_concurrent_writers_do_not_mix(path):
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn about fork after torch started threads
        writers = [context.Process(target=append_many, args=(path, n)) for n in range(3)]
        for writer in writers:
            writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    rows = store.read(path)
    assert len(rows) == 60
    for writer in range(3):
        mine = [row.case["index"] for row in rows if row.case["writer"] == writer]
        assert mine == list(range(20))


def test_rows_are_on_disk_when_append_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    store.append(path, ROWS)
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]

"""The file of answers: two runs may write to it, and a crash costs at most the last answer."""

import fcntl
import multiprocessing
import os

import pytest

from octavo.errors import CheckpointError
from octavo.measure.evaluate.language import Reply
from octavo.measure.evaluate.tasks import AnswerFile, StoredAnswer
from octavo.measure.store import TornLineWarning

NUM_ANSWERS = 60


def answer(key, text):
    return StoredAnswer(
        key=key,
        row="fp8",
        question="q",
        repetition=0,
        answer="A",
        found=None,
        is_right=False,
        reply=Reply(text, False, 3),
    )


def text_of(writer, number):
    """As long as an answer with much thinking: a reader may see half of it being written."""
    return f"{writer}:{number} " * (20_000 + 370 * number)


def write_many(path, writer, barrier):
    barrier.wait(60)
    for number in range(NUM_ANSWERS):
        if number % 5 == 0:  # a run that was stopped and is resumed, while the other one writes
            answers = AnswerFile(path, is_resumed=True)
        answers.append(answer(f"{writer}-{number}", text_of(writer, number)))


def test_no_answer_of_two_writers_is_lost(tmp_path):
    path = tmp_path / "answers.jsonl"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    writers = [context.Process(target=write_many, args=(path, w, barrier)) for w in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = AnswerFile(path, is_resumed=True)
    lost = [
        (writer, number)
        for writer in "ab"
        for number in range(NUM_ANSWERS)
        if found.reply(f"{writer}-{number}") != Reply(text_of(writer, number), False, 3)
    ]
    assert not lost and len(path.read_bytes().splitlines()) == 2 * NUM_ANSWERS


def write_in_halves(path, is_half_written, go_on):
    """Write a line as the store does, on a disk that stops in the middle of it."""
    line = path.with_name("line").read_bytes()
    with open(path, "ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(line[: len(line) // 2])
        is_half_written.set()
        go_on.wait(60)
        file.write(line[len(line) // 2 :])


def resume_and_append(path):
    AnswerFile(path, is_resumed=True).append(answer("b", text_of("b", 0)))


def test_a_run_that_starts_waits_for_an_answer_that_is_being_written(tmp_path):
    path, context = tmp_path / "answers.jsonl", multiprocessing.get_context("fork")
    AnswerFile(path).append(answer("first", "one"))
    AnswerFile(tmp_path / "line").append(answer("a", text_of("a", 0)))
    is_half_written, go_on = context.Event(), context.Event()
    first = context.Process(target=write_in_halves, args=(path, is_half_written, go_on))
    second = context.Process(target=resume_and_append, args=(path,))
    first.start()
    assert is_half_written.wait(60)
    second.start()
    second.join(0.3)
    assert second.is_alive()
    go_on.set()
    for process in (first, second):
        process.join()
        assert process.exitcode == 0
    found = AnswerFile(path, is_resumed=True)
    texts = {"first": "one", "a": text_of("a", 0), "b": text_of("b", 0)}
    assert {key: found.reply(key).text for key in texts} == texts


def test_an_answer_is_on_disk_when_it_is_written(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def remember(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    path = tmp_path / "answers.jsonl"
    AnswerFile(path).append(answer("a", "text"))
    assert synced == [str(path), str(tmp_path)]


@pytest.mark.parametrize("tail", [b"{", b'{"key": "b", "te', b"\0" * 100])
def test_what_a_crash_left_of_an_answer_is_asked_for_again(tail, tmp_path):
    path = tmp_path / "answers.jsonl"
    AnswerFile(path).append(answer("a", "first"))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with pytest.warns(TornLineWarning, match=r"answers\.jsonl:2: the last line is incomplete"):
        found = AnswerFile(path, is_resumed=True)
    assert found.reply("a") == Reply("first", False, 3) and found.reply("b") is None
    with pytest.warns(TornLineWarning):
        found.append(answer("b", "second"))
    assert path.read_bytes().startswith(whole) and len(path.read_bytes().splitlines()) == 2
    assert AnswerFile(path, is_resumed=True).reply("b") == Reply("second", False, 3)


def test_an_answer_that_lacks_only_its_newline_counts(tmp_path):
    path = tmp_path / "answers.jsonl"
    AnswerFile(path).append(answer("a", "first"))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    found = AnswerFile(path, is_resumed=True)
    found.append(answer("b", "second"))
    again = AnswerFile(path, is_resumed=True)
    assert again.reply("a") == Reply("first", False, 3) and again.reply("b") is not None


def test_another_file_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"no answers\nat all")
    with pytest.raises(CheckpointError, match=r"notes\.txt:1: expected an answer, got"):
        AnswerFile(path, is_resumed=True)
    assert path.read_bytes() == b"no answers\nat all"

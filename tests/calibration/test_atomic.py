"""Atomic writes: the old content or the new one, nothing in between and nothing left over."""

import os
import stat
from pathlib import Path

import pytest

from octavo.atomic import write_atomically
from octavo.errors import ConfigError


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"one")
    write_atomically(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_alone(call, tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_interrupt_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert os.listdir(tmp_path) == []


def test_the_new_content_is_complete_before_it_gets_its_name(tmp_path, monkeypatch):
    replace, seen = os.replace, []

    def look(source, target):
        seen.append((os.path.dirname(source), Path(source).read_bytes()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    write_atomically(tmp_path / "file", b"x" * 100_000)
    assert seen == [(str(tmp_path), b"x" * 100_000)]


def test_permissions(tmp_path):
    path = tmp_path / "file"
    umask = os.umask(0o027)
    try:
        write_atomically(path, b"one")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        write_atomically(path, b"two")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(umask)


def test_a_symbolic_link_is_followed(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_long_names(tmp_path):
    path = tmp_path / ("n" * 255)
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"


def test_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="expected an existing folder"):
        write_atomically(tmp_path / "none" / "file", b"")


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(ConfigError, match="expected the path of a file, got the folder"):
        write_atomically(tmp_path, b"")

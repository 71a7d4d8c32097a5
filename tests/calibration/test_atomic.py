"""Atomic writes: the old content or the new one, nothing in between and nothing left over."""

import os
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
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


WRITERS = {
    "a file": """
from octavo.atomic import write_atomically
write_atomically("file", b"x" * 100_000)""",
    "frames": """
from PIL import Image
from octavo.integrations.diffusers.image_files import write_video
write_video([Image.new("RGB", (16, 16))], Path("frames"), 8)""",
    "a video": """
import diffusers.utils
diffusers.utils.export_to_video = lambda frames, path, **options: Path(path).write_bytes(b"video")
from octavo.integrations.diffusers.image_files import write_video
write_video([], Path("video.mp4"), 8)""",
    "a library": """
import lzma
from octavo.measure.bench.peers import _unpacked
Path("a.so.xz").write_bytes(lzma.compress(b"library"))
_unpacked(Path("."), ".so")""",
}
STOP = """
import os, sys, time
from pathlib import Path
def stop(*args):
    print("written", flush=True)
    time.sleep(60)
"""
AT = {"frames": "Path.rename = stop"}  # where what was written gets its name


@contextmanager
def stopped_writer(folder, what):
    """A process that was stopped when its temporary file was whole and had no name yet."""
    code = "\n".join([STOP, AT.get(what, "os.replace = stop"), WRITERS[what]])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=environment, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout.readline() == b"written\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "what",  # the others take the time that importing torch and diffusers takes
    [pytest.param(what, marks=[pytest.mark.slow] * (what != "a file")) for what in WRITERS],
)
def test_what_a_killed_process_leaves_is_removed_by_the_next_write(what, tmp_path):
    if what in ("a video", "frames"):
        pytest.importorskip("diffusers")
    with stopped_writer(tmp_path, what) as process:
        left = [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        assert len(left) == 1
        write_atomically(tmp_path / "other", b"one")
        assert left[0].exists()  # its process lives
        process.send_signal(signal.SIGKILL)
        process.wait()
    write_atomically(tmp_path / "other", b"two")
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".xz"] == ["other"]


def test_files_of_others_stay(tmp_path):
    for name in (".octavo-notes.tmp", "octavo-0123456789abcdef.tmp", ".other.tmp"):
        (tmp_path / name).touch()
    (tmp_path / ".octavo-0123456789abcdef.tmp").symlink_to(tmp_path / ".other.tmp")
    write_atomically(tmp_path / "file", b"one")
    assert len(list(tmp_path.iterdir())) == 5


def test_a_temporary_file_that_was_removed_before_it_was_locked_is_made_again(
    tmp_path, monkeypatch
):
    import fcntl

    flock, removed = fcntl.flock, []

    def remove(descriptor, operation):
        if not removed:
            removed.extend(tmp_path.glob(".octavo-*"))
            removed[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove)
    write_atomically(tmp_path / "file", b"one")
    assert removed and os.listdir(tmp_path) == ["file"]

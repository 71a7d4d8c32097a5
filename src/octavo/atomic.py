"""Writing a file so that a crash leaves the old one or the new one, never half of either.

A temporary file stays locked as long as its process lives. One without a lock was left by a process
that was killed, and the next write into the same folder removes it.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from octavo.errors import ConfigError

# .mp4 and no ending at all: temporary videos and folders of octavo 0.1.
_TEMPORARY = re.compile(r"\.octavo-[0-9a-f]{16}(\.tmp|\.mp4)?")


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Make `content` the whole content of the file at `path`; a symbolic link is followed.

    Raises ConfigError if there cannot be a file at `path`, OSError if the disk refuses.
    """
    target = check_target(path)
    with temporary_path(target.parent, is_folder=False) as temporary:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    sync_folder(target.parent)


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file that `path` is or leads to; ConfigError if there cannot be one."""
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise ConfigError(
            f"expected an existing folder for {path}, got none; create {target.parent}"
        )
    if target.is_dir():
        raise ConfigError(f"expected the path of a file, got the folder {path}")
    return target


def sync_folder(folder: Path) -> None:
    """Bring the names of new files to the disk: they reach it only when their folder does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_path(parent: Path, *, is_folder: bool) -> Iterator[Path]:
    """A new file or folder, to be renamed when it is whole; removed with what is left in it.

    parent: the folder of the target, since renaming is one step only within one file system.
    """
    _remove_abandoned(parent)
    path, descriptor = _make_locked(parent, is_folder)
    try:
        yield path
    finally:
        _remove(path)
        os.close(descriptor)


def _make_locked(parent: Path, is_folder: bool) -> tuple[Path, int]:
    while True:
        path = parent / f".octavo-{secrets.token_hex(8)}.tmp"
        if is_folder:
            path.mkdir()
        else:
            path.touch(exist_ok=False)
        # Another process may have found it before it was locked, and removed it.
        with contextlib.suppress(FileNotFoundError):
            descriptor = _open(path)
            with contextlib.suppress(OSError):  # a file system without locks: nobody removes it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files and folders of processes that are gone."""
    with os.scandir(folder) as entries:
        found = [Path(entry.path) for entry in entries if _TEMPORARY.fullmatch(entry.name)]
    for path in found:
        with contextlib.suppress(OSError):  # in use, gone by now, or somebody else's
            descriptor = _open(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(descriptor)


def _open(path: Path) -> int:
    # NFS locks only what is open for writing, which a folder cannot be.
    mode = os.O_RDONLY if path.is_dir() else os.O_RDWR
    return os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

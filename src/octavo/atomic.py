"""Writing a file so that a crash leaves the old one or the new one, never half of either."""

import os
import secrets
import shutil
from pathlib import Path

from octavo.errors import ConfigError


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Make `content` the whole content of the file at `path`; a symbolic link is followed.

    Raises ConfigError if there cannot be a file at `path`, OSError if the disk refuses.
    """
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise ConfigError(
            f"expected an existing folder for {path}, got none; create {target.parent}"
        )
    if target.is_dir():
        raise ConfigError(f"expected the path of a file, got the folder {path}")
    # Renaming replaces a file in one step only within one file system: same folder.
    temporary = target.with_name(f".octavo-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names of new files to the disk: they reach it only when their folder does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

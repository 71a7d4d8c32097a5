"""The file of single answers: what each row said to each question, and whether it was right.

JSON Lines, appended as answers come. A run that is resumed takes the answers that are there
already; their keys say by what they were made.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError
from octavo.measure.evaluate.endpoint import Reply


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """A reply, what was read of it, and whether that is the true answer."""

    key: str
    row: str
    question: str
    repetition: int
    answer: str
    found: str | None
    is_right: bool
    reply: Reply


class AnswerFile:
    """Answers of a run; path: None keeps none. is_resumed: whether those in it are used again."""

    def __init__(self, path: Path | None = None, *, is_resumed: bool = False) -> None:
        self._path = path
        self._replies: dict[str, Reply] = {}
        if path is None:
            if is_resumed:
                raise ConfigError("--resume goes on with the file of --answers, which is not given")
            return
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"expected an existing folder for {path}; create {path.parent}")
        if not path.exists():
            return
        if not is_resumed:
            raise ConfigError(f"{path} is there already: add --resume to go on with it")
        self._replies = _read(path)

    def reply(self, key: str) -> Reply | None:
        """The reply of before with this key."""
        return self._replies.get(key)

    def append(self, answer: StoredAnswer) -> None:
        """Write an answer at the end of the file."""
        if self._path is None:
            return
        fields: dict[str, Any] = {**vars(answer), **vars(answer.reply)}
        del fields["reply"]
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def _read(path: Path) -> dict[str, Reply]:
    """The replies of a file; what a crash left of its last line is cut off."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    replies = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            key, text, is_cut, tokens = (
                row[name] for name in ("key", "text", "is_cut", "num_tokens")
            )
        except (LookupError, TypeError, ValueError):
            raise CheckpointError(
                f"{path}:{number}: expected an answer, got {brief(line)}"
            ) from None
        replies[str(key)] = Reply(str(text), bool(is_cut), tokens)
    return replies

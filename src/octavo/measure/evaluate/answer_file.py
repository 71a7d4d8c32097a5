"""The file of single answers: what each row said to each question, and whether it was right.

JSON Lines, appended as answers come, with the lock and the care of records (measure/store.py): more
than one run may write to a file. A run that is resumed takes the answers that are there already;
their keys say by what they were made.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError
from octavo.measure import store
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
        store.check_folder(path)
        if not path.exists():
            return
        if not is_resumed:
            raise ConfigError(f"{path} is there already: add --resume to go on with it")
        self._replies = dict(store.read_lines(path, ANSWERS))

    def reply(self, key: str) -> Reply | None:
        """The reply of before with this key."""
        return self._replies.get(key)

    def append(self, answer: StoredAnswer) -> None:
        """Write an answer at the end of the file; it is on disk when this returns."""
        if self._path is None:
            return
        fields: dict[str, Any] = {**vars(answer), **vars(answer.reply)}
        del fields["reply"]
        store.append_lines(self._path, [json.dumps(fields)], ANSWERS)


def _parse(line: str) -> tuple[str, Reply]:
    """The key and the reply of one line."""
    try:
        row = json.loads(line)
        key, text, is_cut, tokens = (row[name] for name in ("key", "text", "is_cut", "num_tokens"))
    except (LookupError, TypeError, ValueError):
        raise CheckpointError(f"expected an answer, got {brief(line)}") from None
    return str(key), Reply(str(text), bool(is_cut), tokens)


ANSWERS = store.RowFormat(_parse, start=b'{"key": ')

"""Pictures of two rows beside each other, kept in a folder, and how records name them."""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from octavo.measure.evaluate.contact_sheet import MAX_COMPARED, save_compared
from octavo.measure.evaluate.images import Keep


def keep_compared(folder: Path | None, prompts: Sequence[str], records: Path | None) -> Keep | None:
    """What writes such pictures to a folder, for records of that file; None without either.

    A picture is named by its path from the records file on, so that both can be moved together.
    """
    if folder is None or records is None:
        return None

    def keep(rows: Sequence[tuple[str, list[Tensor]]]) -> tuple[str, Sequence[str]]:
        path = save_compared(folder, prompts, rows)
        place = os.path.relpath(path.resolve(), records.resolve().parent)
        return Path(place).as_posix(), prompts[:MAX_COMPARED]

    return keep

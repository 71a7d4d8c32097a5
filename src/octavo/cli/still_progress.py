"""A bar that is drawn when it is told to, and at no other time."""

import time
from typing import Any

from rich.progress import Progress

from octavo.cli.console import err

# Seconds between two drawings: a millisecond each is then lost in what is measured.
EVERY_S = 2.0


class StillProgress(Progress):
    """No thread draws it: one would take turns with the Python that is measured."""

    def __init__(self) -> None:
        super().__init__(console=err, auto_refresh=False)
        self._drawn_s = 0.0

    def step(self, task: Any, description: str) -> None:
        """One more of a task's parts is done, or begins; drawn now and then."""
        now = time.monotonic()
        is_due = now - self._drawn_s > EVERY_S
        self.update(task, advance=1, description=description, refresh=is_due)
        if is_due:
            self._drawn_s = now

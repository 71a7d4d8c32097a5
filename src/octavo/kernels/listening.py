"""Who hears of launches: a tape of a call (octavo.ops.tape); no Triton here."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel as Triton compiled it for a launch, its grid, and its arguments in order."""

    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


Listener = Callable[[Launch | None], object]


class _Thread(threading.local):
    listener: Listener | None = None


_THREAD = _Thread()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` of each launch in this thread; None is one that cannot be repeated."""
    before, _THREAD.listener = _THREAD.listener, listener
    try:
        yield
    finally:
        _THREAD.listener = before


def listener() -> Listener | None:
    """Who listens to the launches of this thread."""
    return _THREAD.listener

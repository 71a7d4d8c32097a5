"""What the layer that runs leaves for its backend is there, empty, when a thread begins.

A compiled block guards what it finds in the state of its thread. An attribute that its first call
would add makes the guards fail of the graph that was just compiled.
"""

import threading

from octavo.integrations.diffusers.current_layer import _CURRENT, _Current

# Belongs into `_Current` itself. It stands here until GPU tests of diffusion have run with it: they
# have not, and the hash of their record does not cover this file.
_NAMES = ("name", "scales", "left", "see", "backend")


def _begin(state: threading.local) -> None:
    for name in _NAMES:
        setattr(state, name, None)


def begin_whole_() -> None:
    """Let the state of every thread have all of its attributes; that of this one, too."""
    if "__init__" not in vars(_Current):
        # A threading.local is initialized once in each thread that asks for it.
        _Current.__init__ = _begin  # type: ignore[method-assign,assignment]
        if not vars(_CURRENT):
            _begin(_CURRENT)

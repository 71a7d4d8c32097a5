"""What Python does, counted: times would vary with the machine."""

import sys


def num_function_calls(function) -> int:
    """How many functions are called, Python's and C's."""
    found = []
    sys.setprofile(lambda frame, event, arg: found.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in found)

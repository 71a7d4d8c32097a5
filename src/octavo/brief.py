"""Values and names in messages: enough to recognise them, however large they are."""

import reprlib
from collections.abc import Sequence

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100

NUM_NAMES_SHOWN = 20


def brief(value: object) -> str:
    """repr(value), cut to about a line."""
    try:
        return _REPR.repr(value)
    except ValueError:  # an int of more than 4300 digits
        return "a huge number"


def list_names(names: Sequence[str]) -> str:
    """The names with commas between them, and how many more there are after the first 20."""
    shown = ", ".join(brief(name) for name in names[:NUM_NAMES_SHOWN])
    num_more = len(names) - NUM_NAMES_SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object_pairs_hook of json that refuses an object with a key twice."""
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{brief(key)} appears twice")
            seen.add(key)
    return document

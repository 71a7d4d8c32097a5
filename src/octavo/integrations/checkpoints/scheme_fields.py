"""Settings of a quantization scheme in a checkpoint's JSON, if all of them are understood."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError

# Key -> the values that are understood; None where any value means the same to us.
Expected = Mapping[str, Sequence[Any] | None]


def check_fields(
    label: str, scheme: object, expected: Expected, required: Sequence[str]
) -> dict[str, Any]:
    """The scheme, if all its keys and values are among the expected; CheckpointError otherwise."""
    if not isinstance(scheme, dict):
        raise CheckpointError(f"expected {label} to be an object, got {brief(scheme)}")
    if unknown := [key for key in scheme if key not in expected]:
        raise CheckpointError(f"{label} has settings we do not know: {list_names(unknown)}")
    for key, values in expected.items():
        if values is None or (key not in scheme and key not in required):
            continue
        # True is 1 and False is 0 to Python, not to a file.
        said = (scheme.get(key), type(scheme.get(key)))
        if said not in [(value, type(value)) for value in values]:
            choices = " or ".join(map(repr, values))
            raise CheckpointError(
                f"{label}: expected {key} {choices}, got {brief(scheme.get(key))}"
            )
    return scheme

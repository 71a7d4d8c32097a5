"""JSON schemas whose objects have the properties that they declare, and no others."""

from collections.abc import Iterator, Mapping
from typing import Any

# Keywords that say more about the same value, with one schema, several, or several by name.
SAME_VALUE = ("$ref", "allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas")
# Keywords with schemas of the value's parts.
PARTS = ("items", "prefixItems", "properties", "patternProperties", "additionalProperties")
DEFINITIONS = ("$defs", "definitions")
SAYS_OTHERWISE = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with additionalProperties false wherever an object declares properties.

    Objects that say themselves what else they may have stay as they are, and so do those whose
    properties are declared in several places (allOf, a $ref beside properties): each place would
    forbid what the others declare.
    """
    is_shared: dict[int, bool] = {}
    _find_shared(schema, schema, False, is_shared)
    closed: dict[str, Any] = _closed(schema, is_shared)
    return closed


def _find_shared(schema: Any, root: Any, is_part: bool, is_shared: dict[int, bool]) -> None:
    """Note, by id, whether a schema is one of several that declare the properties of an object."""
    if not isinstance(schema, Mapping):
        return
    same = list(_schemas(schema, SAME_VALUE, root))
    num_places = ("properties" in schema) + sum(_declares(one, root, set()) for one in same)
    # Alternatives exclude each other, unless something is declared beside them.
    is_choice = list(schema.keys() & {"properties", *SAME_VALUE}) in (["anyOf"], ["oneOf"])
    is_several = is_part or (num_places > 1 and not is_choice)
    if is_shared.get(id(schema)) in (True, is_several):
        return
    is_shared[id(schema)] = is_several
    for one in same:
        _find_shared(one, root, is_several, is_shared)
    for one in _schemas(schema, (*PARTS, *DEFINITIONS), root):
        _find_shared(one, root, False, is_shared)


def _declares(schema: Any, root: Any, seen: set[int]) -> bool:
    """Whether a schema has properties, its own or of others that it refers to."""
    if not isinstance(schema, Mapping) or id(schema) in seen:  # a $ref may lead back
        return False
    seen.add(id(schema))
    same = _schemas(schema, SAME_VALUE, root)
    return "properties" in schema or any(_declares(one, root, seen) for one in same)


def _schemas(schema: Mapping[str, Any], keywords: tuple[str, ...], root: Any) -> Iterator[Any]:
    """The schemas below these keywords."""
    for keyword in keywords:
        match schema.get(keyword):
            case str(reference):
                yield _target(reference, root)
            case list(several):
                yield from several
            case Mapping() as found:
                is_one = keyword in ("items", "additionalProperties", "then", "else")
                yield from [found] if is_one else found.values()


def _target(reference: str, root: Any) -> Any:
    """What a $ref in the same document points to; None if it is not there."""
    found = root if reference.startswith("#") else None
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        match found:
            case Mapping():
                found = found.get(name)
            case list() if name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            case _:
                return None
    return found


def _closed(schema: Any, is_shared: Mapping[int, bool]) -> Any:
    if isinstance(schema, list):
        return [_closed(one, is_shared) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _closed(value, is_shared) for key, value in schema.items()}
    is_alone = is_shared.get(id(schema)) is False
    if is_alone and "properties" in schema and not schema.keys() & set(SAYS_OTHERWISE):
        made["additionalProperties"] = False
    return made

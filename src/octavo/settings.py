"""Settings: what all parts of a recipe share.

Settings are data: frozen, comparable and strict about their keys; a problem with them is a
ConfigError in octavo's words.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from octavo.amounts import parse_tokens
from octavo.brief import brief
from octavo.errors import ConfigError

Shorthands = Mapping[str, Mapping[str, str]]
# A number of tokens, 4096 or "4k".
Tokens = Annotated[int, BeforeValidator(lambda value: parse_tokens(str(value)))]


class Settings(BaseModel):
    """What all settings share: frozen, strict about keys, and errors that are ConfigErrors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shorthands: ClassVar[Shorthands] = {"fp8": {}}

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            problems = [_problem(line, type(self)) for line in error.errors(include_url=False)[:5]]
            raise ConfigError("; ".join(problems)) from None

    @classmethod
    def read(cls, value: object, *, other_words: tuple[str, ...] = ()) -> Self | None:
        """The settings that `value` means: None, a shorthand, a mapping or settings already."""
        if type(value) is cls:  # a Recipe is not the recipe of a component
            return value
        if read_none(value) is None:
            return None
        if isinstance(value, str) and value in cls.shorthands:
            return cls(**cls.shorthands[value])
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return cls(**value)
        words = ", ".join(["None", *map(repr, (*cls.shorthands, *other_words))])
        keys = ", ".join(cls.model_fields)
        raise ConfigError(f"expected {words} or settings ({keys}), got {brief(value)}")

    def written_fields(self) -> Iterator[tuple[str, Any]]:
        """The fields that a file or a repr shows: all but those that are empty by default."""
        for name, value in self:
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if value or value != default:
                yield name, value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return self.written_fields()

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.written_fields())


def _problem(line: Mapping[str, Any], model: type[BaseModel]) -> str:
    """One line of a pydantic ValidationError in octavo's words."""
    where = ".".join(str(part)[:100] for part in line["loc"])
    match line["type"]:
        case "extra_forbidden":
            close = difflib.get_close_matches(where, model.model_fields, n=1)
            advice = f"did you mean {close[0]!r}?" if close else "remove it"
            keys = ", ".join(model.model_fields)
            return f"unknown key {where!r}: {advice} (the keys are {keys})"
        case "value_error":
            problem = line["ctx"]["error"]
            return f"{where}: {problem}" if where else str(problem)
        case _:
            expected = line["msg"].replace("Input should be", "expected")
            return f"{where}: {expected}, got {brief(line['input'])}"


def read_none(value: object) -> object:
    """`value`, or None where a file says "none"."""
    return None if isinstance(value, str) and value == "none" else value

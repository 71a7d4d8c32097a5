"""Settings: what all parts of a recipe share.

Settings are data: frozen, comparable and strict about their keys; a problem with them is a
ConfigError in octavo's words.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar, dataclass_transform

import pydantic
import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from octavo.amounts import parse_tokens
from octavo.brief import brief
from octavo.errors import ConfigError

Shorthands = Mapping[str, Mapping[str, str]]
# A number of tokens, 4096 or "4k".
Tokens = Annotated[int, BeforeValidator(lambda value: parse_tokens(str(value)))]
Count = Annotated[int, Field(ge=1)]

T = TypeVar("T")


class Settings(BaseModel):
    """What all settings share: frozen, strict about keys, and errors that are ConfigErrors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shorthands: ClassVar[Shorthands] = {"fp8": {}}

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _config_error(error, type(self).model_fields) from None

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


@dataclass_transform(frozen_default=True, kw_only_default=True)
def checked(cls: type[T]) -> type[T]:
    """A frozen dataclass of keywords whose fields pydantic checks, with errors as of Settings.

    Annotated[int, Field(ge=1)] is checked like this, and a number must be finite.
    """
    made: Any = pydantic.dataclasses.dataclass(
        frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False)
    )(cls)

    def __init__(self: T, /, **fields: Any) -> None:
        try:
            given = pydantic_core.ArgsKwargs((), fields)
            made.__pydantic_validator__.validate_python(given, self_instance=self)
        except ValidationError as error:
            raise _config_error(error, made.__dataclass_fields__) from None

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]


def _config_error(error: ValidationError, keys: Collection[str]) -> ConfigError:
    """The first problems that pydantic found, in octavo's words."""
    return ConfigError("; ".join(_problem(line, keys) for line in error.errors()[:5]))


def _problem(line: Mapping[str, Any], keys: Collection[str]) -> str:
    where = ".".join(str(part)[:100] for part in line["loc"])
    match line["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            close = difflib.get_close_matches(where, keys, n=1)
            advice = f"did you mean {close[0]!r}?" if close else "remove it"
            return f"unknown key {where!r}: {advice} (the keys are {', '.join(keys)})"
        case "value_error":
            problem = line["ctx"]["error"]
            return f"{where}: {problem}" if where else str(problem)
        case _:
            expected = re.sub(r"^\w+ should (be|have)", "expected", line["msg"])
            expected = re.sub("^expected (?=greater|less)", "expected a number ", expected)
            return f"{where}: {expected}, got {brief(line['input'])}"


def read_none(value: object) -> object:
    """`value`, or None where a file says "none"."""
    return None if isinstance(value, str) and value == "none" else value

"""Flags from settings, and options that several commands share.

A parameter of a command that is a dataclass stands for one flag per field. The field's name, type
and default are the flag's, its entry under `Attributes:` in the docstring is the flag's help, and
the dataclass itself checks the values:

    @dataclass(frozen=True, kw_only=True)
    class BatchCase:
        '''A batch to time.

        Attributes:
            num_warmups: Batches before those that count.
        '''

        num_warmups: Annotated[int, typer.Option("--num-iters-warmup")] = 1

    @takes_settings
    def latency(case: BatchCase, seed: int = 0) -> None: ...

Settings that are flags live in modules without torch, so that `--help` stays quick.
"""

import copy
import dataclasses
import functools
import inspect
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import ParameterInfo

from octavo.atomic import check_target
from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Says how one command shows settings of others: `Annotated[EngineSettings, Flags(...)]`.

    Attributes:
        names: Flags of fields whose flag is not their own name with hyphens: "--batch -n" for both.
            A name without hyphens, "MODEL", makes an argument.
        help: Texts that replace those of the docstring.
        defaults: Defaults that replace those of the fields.
        without: Fields that are not flags here and keep their defaults.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    help: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()


def takes_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function with dataclass parameters into one that typer reads flag by flag.

    Its other parameters are flags of their own, with `Attributes:` in the function's docstring.
    """
    types, hints = get_type_hints(command), get_type_hints(command, include_extras=True)
    texts = _entries(command.__doc__)
    flags: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        hint, kind = hints[name], types[name]
        notes = getattr(hint, "__metadata__", ())
        shown = next((note for note in notes if isinstance(note, Flags)), Flags())
        if hint is typer.Context:
            flags.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            own = _flags_of(kind, shown)
            groups[name] = kind, [flag.name for flag in own]
            flags += own
        else:
            flags.append(_flag(name, hint, kind, shown, parameter.default, texts))
    names = [flag.name for flag in flags]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise TypeError(f"{command.__name__} defines a flag twice: {', '.join(repeated)}")

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        values = {k: tuple(x) if isinstance(x, list) else x for k, x in values.items()}
        for name, (settings, fields) in groups.items():
            values[name] = settings(**{one: values.pop(one) for one in fields})
        return command(**values)

    del run.__wrapped__  # typer would read the signature behind it
    run.__doc__ = inspect.cleandoc(command.__doc__ or "").partition("\nAttributes:\n")[0]
    run.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return run


def field_help(settings: type) -> dict[str, str]:
    """The entries under `Attributes:` in the docstrings of a dataclass and those it extends."""
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        found |= _entries(cls.__doc__)
    return found


def _entries(docstring: str | None) -> dict[str, str]:
    _, _, section = inspect.cleandoc(docstring or "").partition("\nAttributes:\n")
    entries = [one.partition(":") for one in re.split(r"\n(?=\S)", textwrap.dedent(section))]
    return {name: " ".join(text.split()) for name, _, text in entries}


def field_names(*settings: type) -> frozenset[str]:
    """The fields of some settings, which are parameters of a command that takes them."""
    return frozenset(own.name for one in settings for own in dataclasses.fields(one))


# Parameters that say where results go, and nothing of what is measured.
PLACES = ("output", "as_json", "output_json", "plot", "strict")


def given_flags(context: typer.Context, names: Collection[str]) -> list[str]:
    """The flags of those parameters that are on the command line."""
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            is_off = context.params[parameter.name] is False and parameter.secondary_opts
            found.append((parameter.secondary_opts if is_off else parameter.opts)[0])
    return found


def refuse_flags(context: typer.Context, *rules: tuple[bool, Collection[str], str]) -> None:
    """Raise ConfigError for flags that were given and mean nothing; {} in a text are their names.

    rules: whether some parameters mean nothing here, these, and the text of the error.
    """
    for is_wrong, names, text in rules:
        if is_wrong and (given := given_flags(context, names)):
            raise ConfigError(text.format(", ".join(given)))


def read_object(flag: str, text: str | None) -> dict[str, Any] | None:
    """The JSON object that a flag has as its text."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: expected a JSON object, got {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag}: expected a JSON object, got {text[:100]}")
    return found


def repeat_command(
    context: typer.Context,
    without: Iterable[str] = PLACES,
    taken: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The command line that repeats this run: its arguments and all flags not at their defaults.

    without: parameters that do not belong to a measurement, such as the file of its records. taken:
    values in place of those given, such as defaults that depend on the machine; None leaves one
    out. A folder of peers is FOLDER, whichever it was on this machine.
    """
    arguments: list[str] = []
    flags: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        value = taken.get(name, context.params.get(name))
        if name in without or value in (None, [], ()):
            continue
        if name == "peers":
            value = "FOLDER"
        is_taken = name in taken or value != parameter.get_default(context)
        if parameter.param_type_name == "argument":
            arguments.append(str(value))
        elif isinstance(value, bool):
            if is_taken:
                flags.append((parameter.opts if value else parameter.secondary_opts)[0])
        elif is_taken:
            for one in value if isinstance(value, list | tuple) else [value]:
                flags += [parameter.opts[0], str(one)]
    return shlex.join([*context.command_path.split(), *arguments, *flags])


def _flags_of(settings: type, shown: Flags) -> list[inspect.Parameter]:
    types, hints = get_type_hints(settings), get_type_hints(settings, include_extras=True)
    texts = field_help(settings)
    fields = {own.name: own for own in dataclasses.fields(settings) if own.init}
    named = {*shown.names, *shown.help, *shown.defaults, *shown.without}
    if unknown := sorted(named - set(fields)):
        raise TypeError(f"{settings.__name__} has no field {', '.join(unknown)}")
    flags = []
    # What a class adds comes before what it has of those that it extends.
    classes = reversed(list(enumerate(settings.__mro__)))
    order = {name: place for place, cls in classes for name in inspect.get_annotations(cls)}
    for name, own in sorted(fields.items(), key=lambda item: order[item[0]]):
        if name in shown.without:
            continue
        default = shown.defaults.get(name, own.default)
        if default is dataclasses.MISSING:
            default = inspect.Parameter.empty
        flags.append(_flag(name, hints[name], types[name], shown, default, texts))
    return flags


def _flag(
    name: str, hint: Any, kind: Any, shown: Flags, default: Any, texts: Mapping[str, str]
) -> inspect.Parameter:
    named = shown.names.get(name)
    given = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, ParameterInfo)]
    if named is not None and not named.startswith("-"):
        option: Any = typer.Argument(metavar=named, show_default=False)
    elif given and named is None:  # the field's own typer.Option or typer.Argument
        option = copy.copy(given[0])
    else:
        option = typer.Option(*(named or "").split())
    if default in (None, ()):
        option.show_default = False
    option.help = shown.help.get(name) or option.help or texts.get(name)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=list(default) if isinstance(default, tuple) else default,
        annotation=Annotated[_typer_type(kind), option],
    )


def _typer_type(kind: Any) -> Any:
    """A field's type in typer's terms: a tuple of any length is a flag to give repeatedly."""
    if {str, Path} <= set(get_args(kind)):
        return str | None  # typer has no unions; the settings take both
    return list[get_args(kind)[0]] if get_args(kind)[1:] == (...,) else kind  # type: ignore[misc]


def check_file(path: Path | None) -> Path | None:
    """The callback of an option for a file to write: where there cannot be one, nothing runs."""
    if path is not None:
        check_target(path)
    return path


RecordsFile = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", callback=check_file, help="Append the records to this JSON Lines file."
    ),
]
Written = Annotated[Path | None, typer.Option(callback=check_file)]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the records as JSON Lines instead of a table.")
]


def _read_strictly(context: typer.Context, strict: bool) -> bool:
    if strict:
        from octavo.calibration.scale_file import strict_reading

        context.with_resource(strict_reading())  # until the command ends
    return strict


Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        callback=_read_strictly,
        help="Refuse scale files with anything that octavo does not write. Left out, what vLLM's "
        "loader tolerates is a warning.",
    ),
]


def row_file(path: Path, *words: str | int) -> Path:
    """The path with words before its ending, for a file of each row: v.json, v-fp8-256.json."""
    names = [re.sub(r"[^\w.+=-]", "_", str(word)) for word in words]
    return path.with_name("-".join([path.stem, *names]) + path.suffix)


def split_numbers(text: str, expected: str, kind: Callable[[str], Any] = float) -> tuple[Any, ...]:
    """Numbers with commas between; expected: what the error asks for."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"expected {expected}; got {text!r}") from None


def split_names(text: str) -> list[str]:
    """Names with commas between, in lower case, each once."""
    return list(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))


def split_rows(text: str) -> list[str]:
    """Rows with commas between, each once; words in lower case, files and patterns as they are."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return list(dict.fromkeys(p if set("/.=") & set(p) else p.lower() for p in parts))

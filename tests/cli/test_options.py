"""Flags come from the fields of settings: names, types, defaults, help and checks."""

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli.options import (
    Flags,
    field_help,
    field_names,
    given_flags,
    read_object,
    repeat_command,
    split_numbers,
    split_rows,
    takes_settings,
)
from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Base:
    """What all batches share.

    Attributes:
        seed: Of random prompts.
    """

    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch(Base):
    """A batch to time.

    Attributes:
        output_len: Tokens of an answer,
            the last one included.
        num_warmups: Batches before those that count.
        skip: Layers to leave alone.
        is_eager: Whether every kernel is launched by itself.
    """

    output_len: int = 128
    num_warmups: Annotated[int, typer.Option("--num-iters-warmup")] = 1
    skip: tuple[str, ...] = ()
    is_eager: bool = True
    name: str | None = None

    def __post_init__(self):
        if self.output_len < 2:
            raise ConfigError(f"expected output_len of 2 or more, got {self.output_len}")


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Settings without defaults.

    Attributes:
        size: Of the thing.
    """

    size: int


def invoke(command, *args, **given):
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command("run")(command)
    return CliRunner().invoke(app, args, env={"COLUMNS": "100"}, **given)


def recorder(annotation, seen):
    def command(settings: annotation, other: str = "x") -> None:
        """Run it."""
        seen.append((settings, other))

    return takes_settings(command)


def test_defaults_are_those_of_the_fields():
    seen = []
    assert invoke(recorder(Batch, seen)).exit_code == 0
    assert seen == [(Batch(), "x")]


def test_every_field_is_a_flag():
    seen = []
    args = "--output-len 7 --num-iters-warmup 3 --skip a --skip b --no-is-eager --name n --seed 4"
    assert invoke(recorder(Batch, seen), *args.split(), "--other", "y").exit_code == 0
    wanted = Batch(output_len=7, num_warmups=3, skip=("a", "b"), is_eager=False, name="n", seed=4)
    assert seen == [(wanted, "y")]


def test_help_is_that_of_the_docstrings():
    assert field_help(Batch)["output_len"] == "Tokens of an answer, the last one included."
    text = " ".join(invoke(recorder(Batch, []), "--help").output.split())
    assert "Tokens of an answer, the last one included. [default: 128]" in text
    assert "Of random prompts. [default: 0]" in text
    assert "Layers to leave alone. --" in text


def test_settings_check_the_values():
    result = invoke(recorder(Batch, []), "--output-len", "1")
    assert isinstance(result.exception, ConfigError)
    assert "expected output_len of 2 or more, got 1" in str(result.exception)
    assert invoke(recorder(Batch, []), "--output-len", "many").exit_code == 2


def test_fields_without_defaults_are_required():
    seen = []
    assert invoke(recorder(Needed, seen)).exit_code == 2
    assert invoke(recorder(Needed, seen), "--size", "3").exit_code == 0
    assert seen == [(Needed(size=3), "x")]


def test_a_command_shows_settings_in_its_own_words():
    seen = []
    flags = Flags(
        names={"output_len": "--tokens"},
        help={"seed": "Other words."},
        defaults={"seed": 5},
        without=("name", "is_eager"),
    )
    command = recorder(Annotated[Batch, flags], seen)
    text = invoke(command, "--help").output
    assert "--tokens" in text and "--output-len" not in text and "--name" not in text
    assert "Other words." in text
    assert invoke(command, "--tokens", "9").exit_code == 0
    assert seen == [(Batch(output_len=9, seed=5), "x")]


def test_wrong_fields_are_found_when_the_command_is_made():
    with pytest.raises(TypeError, match="Batch has no field outputs"):
        recorder(Annotated[Batch, Flags(without=("outputs",))], [])

    def twice(settings: Batch, seed: int = 0) -> None: ...

    with pytest.raises(TypeError, match="defines a flag twice: seed"):
        takes_settings(twice)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["a model", "--output-len", "7", "--skip", "a", "--skip", "b c", "--no-is-eager"],
    ],
)
def test_a_run_can_be_repeated(args):
    seen = []

    @takes_settings
    def command(
        context: typer.Context,
        case: Batch,
        model: Annotated[str | None, typer.Argument()] = None,
        output: str | None = None,
    ) -> None:
        seen.append(repeat_command(context, without=("output",)))

    assert invoke(command, *args, "--output", "file").exit_code == 0
    assert seen == [shlex.join(["run", *args])]


def test_what_was_taken_is_recorded_and_peers_are_a_folder():
    """Defaults that depend on the machine are told, where files lie is not."""
    seen = []

    @takes_settings
    def command(
        context: typer.Context,
        case: Batch,
        config: str | None = None,
        peers: str | None = None,
        as_json: bool = False,
    ) -> None:
        taken = {"config": "tiny", "output_len": 128, "name": None}
        seen.append(repeat_command(context, taken=taken))

    assert invoke(command, "--peers", "/some/where", "--as-json", "--name", "n").exit_code == 0
    assert seen == ["run --output-len 128 --config tiny --peers FOLDER"]


def test_lists_with_commas():
    assert split_rows("BF16, fp8+skip=Layer.0,fp8,My/Recipe.toml,fp8") == [
        *("bf16", "fp8+skip=Layer.0", "fp8", "My/Recipe.toml")
    ]
    assert split_numbers("50,99.9", "percentiles") == (50.0, 99.9)
    assert split_numbers("1024,64", "budgets", int) == (1024, 64)
    with pytest.raises(ConfigError, match="expected budgets; got '1,many'"):
        split_numbers("1,many", "budgets", int)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Settings with a choice.

    Attributes:
        by: What is taken at a time.
        count: How often.
    """

    by: Literal["layer", "block"] = "layer"
    count: int = 1


def test_a_literal_is_a_choice():
    seen = []
    command = recorder(Annotated[Chosen, Flags(names={"count": "--count -n"})], seen)
    assert invoke(command, "--by", "block", "-n", "2").exit_code == 0
    assert invoke(command, "--count", "3").exit_code == 0
    assert seen == [(Chosen(by="block", count=2), "x"), (Chosen(count=3), "x")]
    assert type(seen[0][0].by) is str
    wrong = invoke(command, "--by", "model")
    assert wrong.exit_code == 2 and "block" in wrong.output
    assert "[default: layer]" in " ".join(invoke(command, "--help").output.split())


def test_which_flags_were_given():
    seen = []

    @takes_settings
    def command(context: typer.Context, case: Batch, chosen: Chosen) -> None:
        seen.append(given_flags(context, field_names(Chosen) | {"skip"}))

    assert invoke(command, "--by", "layer", "--output-len", "3").exit_code == 0
    assert invoke(command, "--skip", "a").exit_code == 0
    assert seen == [["--by"], ["--skip"]]  # as they are defaults, too


def test_json_objects():
    assert read_object("--x", None) is None
    assert read_object("--x", '{"a": [1]}') == {"a": [1]}
    for text in ("{", "3", "[]"):
        with pytest.raises(ConfigError, match="--x: expected a JSON object, got"):
            read_object("--x", text)


def test_a_commands_own_flags_have_their_help_in_its_docstring():
    seen = []

    @takes_settings
    def command(*, model: Annotated[str, typer.Argument()], rows: tuple[str, ...] = ()) -> None:
        """Run it.

        Attributes:
            model: Of the house.
            rows: To compare,
                one after the other.
        """
        seen.append((model, rows))

    text = " ".join(invoke(command, "--help").output.split())
    assert "Of the house." in text and "To compare, one after the other." in text
    assert "Run it." in text and "Attributes" not in text
    assert invoke(command, "a", "--rows", "x", "--rows", "y").exit_code == 0
    assert seen == [("a", ("x", "y"))]

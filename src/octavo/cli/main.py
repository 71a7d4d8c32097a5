"""The command line: `octavo COMMAND ...`.

A command is a row of COMMANDS and a file of its own. The file is imported when its command runs, so
`octavo --help` stays quick and needs no torch.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octavo import env
from octavo.cli.console import errors_reported, out, print_error
from octavo.version import __version__


@dataclass(frozen=True)
class Command:
    """One row of the table of commands."""

    name: str
    target: str  # "module:name" of the command's function, or of its Typer app
    help: str  # one line for `octavo --help`
    example: str = ""  # a command line worth trying, shown at the end of `octavo --help`

    def load(self) -> Any:
        """The command itself, from its module."""
        module, _, name = self.target.partition(":")
        target = getattr(importlib.import_module(module), name)
        if not isinstance(target, typer.Typer):
            function, target = target, typer.Typer(add_completion=False)
            target.command(self.name)(function)
        command = typer.main.get_command(target)
        command.name = self.name
        _use_plain_help(command)
        return command


# Of each command: its line in `octavo --help`, and a command line worth trying.
_LINES = {
    "advise": (
        "What to quantize in a model on a GPU, what to expect of it, and why.",
        "octavo advise llama-3.1-8b --gpu h200 --context 32k --concurrency 8",
    ),
    "bench": ("How fast each op runs here, checked against float64 first.", "octavo bench kernels"),
    "calibrate": (
        "Static scales: of vision attention, a KV cache, or a diffusion pipeline.",
        "octavo calibrate path/to/model --kv --data text.txt --scale-save-path kv.json",
    ),
    "demo": (
        "The whole story on this machine, CPU included; ends in an HTML report.",
        "octavo demo",
    ),
    "doctor": (
        "GPU, versions and implementations; what a model's KV cache takes and bears.",
        "octavo doctor",
    ),
    "eval": (
        "What FP8 does to a model's answers, beside BF16 and with confidence intervals.",
        "octavo eval chartqa",
    ),
    "export": (
        "A checkpoint with FP8 weights, or scales of its KV cache, for vLLM and others.",
        "octavo export path/to/model --quantization fp8 -o path/to/new",
    ),
    "image": (
        "Images and videos from words, in FP8, and beside BF16 with scores.",
        'octavo image --prompt "cat on blue" --quantization fp8 --compare bf16',
    ),
    "report": (
        "One page from records: plots, tables, machines and commands; no GPU needed.",
        "octavo report results -o report.html",
    ),
    "serve": ("An OpenAI-compatible server for a model, with a page to look at.", "octavo serve"),
    "warmup": (
        "Compile every kernel that a model will need, into a folder that an image can carry.",
        "octavo warmup path/to/model",
    ),
}
_APPS = ("bench", "eval", "serve")  # the others are functions of their names
COMMANDS = tuple(
    Command(name, f"octavo.cli.{name}:{'app' if name in _APPS else name}", *lines)
    for name, lines in _LINES.items()
)

HINT = "Every command explains itself: octavo COMMAND --help"
HELP = "FP8 attention, KV cache and linear layers for PyTorch models: measured, calibrated, served."


def _use_plain_help(command: Any) -> None:
    """Print help in two columns that wrap; rich's six cut option names off at 80 characters."""
    command.rich_markup_mode = None
    paragraphs = (command.help or "").split("\n\n")
    # A command to copy stays in one line: \b turns off wrapping, which would break it at hyphens.
    command.help = "\n\n".join(
        "\b\n" + text.replace("\n", " ") if text.startswith("octavo ") else text
        for text in paragraphs
    )
    for child in getattr(command, "commands", {}).values():
        child.short_help = (child.help or "").partition("\n\n")[0]  # whole: help alone is cut
        _use_plain_help(child)


def make_app(commands: Sequence[Command]) -> typer.Typer:
    """The application with these commands; none of their modules is imported yet."""
    rows = {command.name: command for command in commands}
    examples = [f"  {command.example}" for command in commands if command.example]

    class LazyGroup(TyperGroup):
        """Lists commands from the table, and replaces one by the real thing when it is called."""

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, listed, rest = super().resolve_command(ctx, args)
            return name, rows[name].load() if name in rows else listed, rest

        def invoke(self, ctx: Any) -> Any:
            with errors_reported(is_debug=ctx.params["debug"] or env.is_debug()):
                return super().invoke(ctx)

    app = typer.Typer(
        cls=LazyGroup,
        name="octavo",
        help=HELP,
        # \b: lines stay as they are.
        epilog="\n".join(["\b", "Examples:", *examples, "", HINT] if examples else [HINT]),
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_options)
    for command in commands:
        app.command(command.name, short_help=command.help)(_listed_only)
    return app


def run(app: typer.Typer, args: Sequence[str]) -> int:
    """Run one command line and return the exit code."""
    try:
        typer.main.get_command(app).main(list(args), prog_name="octavo")
    except SystemExit as end:
        if isinstance(end.code, str):
            print_error(end.code)
            return 1
        return end.code or 0
    raise AssertionError("a command line ends with SystemExit")


def main() -> None:
    """The `octavo` program."""
    code = run(make_app(COMMANDS), sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output is gone; what is left of it must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        out.print(f"octavo {__version__}")
        raise typer.Exit


DEBUG = typer.Option("--debug", help="Show the traceback of an error (or OCTAVO_DEBUG=1).")
VERSION = typer.Option(
    "--version", is_eager=True, callback=_print_version, help="Print the version."
)


def _options(
    debug: Annotated[bool, DEBUG] = False, version: Annotated[bool, VERSION] = False
) -> None:
    pass


def _listed_only() -> None:
    raise AssertionError("LazyGroup replaces this command")

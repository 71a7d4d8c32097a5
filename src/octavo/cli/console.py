"""What the commands print with, and how an error ends one.

Exit codes: 0 good, 1 failed, 2 wrong usage, 130 interrupted.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from octavo.errors import OctavoError
from octavo.extras import explain_missing

# Texts come from files and errors too: no [markup], :emoji: or guessed colours in them.
out = Console(markup=False, emoji=False, highlight=False)
err = Console(markup=False, emoji=False, highlight=False, stderr=True)


def print_error(message: str) -> None:
    """One readable paragraph on stderr; characters that steer the terminal are shown as codes."""
    err.print(Text.assemble(("error: ", "bold red"), _printable(message)), soft_wrap=True)


@contextmanager
def errors_reported(*, is_debug: bool) -> Iterator[None]:
    """Turn what a command raises into a paragraph and an exit code; debugging adds a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print_error("interrupted")
        raise typer.Exit(130) from None
    except Exception as error:
        if _belongs_to_typer(error) or isinstance(error, BrokenPipeError):
            raise
        if is_debug:
            err.print(Text(_printable(traceback.format_exc())), soft_wrap=True)
        print_error(_explain(error))
        raise typer.Exit(1) from None


def _belongs_to_typer(error: Exception) -> bool:
    # Wrong usage and exits carry the code that the process ends with.
    return isinstance(error, typer.Abort) or hasattr(error, "exit_code")


def _explain(error: Exception) -> str:
    if message := explain_missing("this command", error):
        return message
    match error:
        case OctavoError():
            return str(error)
        case OSError(strerror=str(reason), filename=str(path)):
            return f"{reason}: {path}"
        case OSError():
            return str(error)
    return (
        f"{type(error).__name__}: {error}\n"
        "This is a bug in octavo. `octavo --debug ...` shows where it happened; please report it."
    )


def _printable(text: str) -> str:
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )

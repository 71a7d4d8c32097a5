"""The frame of the command line: lazy commands, help, exit codes, errors as one paragraph."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import typer

from octavo.cli.main import COMMANDS, Command, main, make_app, run
from octavo.errors import CapacityError, ConfigError
from octavo.version import __version__

SRC = Path(__file__).parents[2] / "src"


def greet(name: str, times: Annotated[int, typer.Option()] = 1) -> None:
    """Say hello to NAME."""
    typer.echo(f"hello {name} " * times)


def config_error() -> None:
    raise ConfigError("margin must be positive, got [red]-1[/red] :boom:\x1b[2J\udcff")


def capacity_error() -> None:
    raise CapacityError("no page left")


def missing_file() -> None:
    Path("/no/such/file").read_text()


def plain_os_error() -> None:
    raise OSError("the disk is unhappy")


def bug() -> None:
    raise KeyError("oops")


def interrupt() -> None:
    raise KeyboardInterrupt


def broken_pipe() -> None:
    raise BrokenPipeError(32, "Broken pipe")


def exit_3() -> None:
    raise typer.Exit(3)


def exit_text() -> None:
    sys.exit("stopped")


def wrong_usage() -> None:
    raise typer.BadParameter("not with that")


def abort() -> None:
    raise typer.Abort


group = typer.Typer(help="Measure things.")
group.command("fast")(lambda: typer.echo("fast it is"))
group.command("fail")(bug)

TARGETS = (greet, config_error, capacity_error, missing_file, plain_os_error, bug, interrupt)
TARGETS += (broken_pipe, exit_3, exit_text, wrong_usage, abort)
PLANTED = [
    *(Command(f.__name__.replace("_", "-"), f"planted:{f.__name__}", "A line.") for f in TARGETS),
    Command("group", "planted:group", "Measure [things].", "octavo group fast --size [1]"),
    Command("absent", "planted_nowhere:absent", "Its module does not exist."),
]


@pytest.fixture
def octavo(monkeypatch, capsys):
    """Run a command line on an app with planted commands: (exit code, stdout, stderr)."""
    module = ModuleType("planted")
    vars(module).update({f.__name__: f for f in TARGETS}, group=group)
    monkeypatch.setitem(sys.modules, "planted", module)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str) -> tuple[int, str, str]:
        code = run(make_app(PLANTED), args)
        return code, *capsys.readouterr()

    return call


def test_version(octavo):
    assert octavo("--version") == (0, f"octavo {__version__}\n", "")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command_with_its_line_and_imports_none(octavo, monkeypatch, flag):
    monkeypatch.delitem(sys.modules, "planted")
    code, out, _ = octavo(flag)
    assert code == 0
    for command in PLANTED:
        assert command.name in out
    assert "Measure [things]." in out
    assert "octavo group fast --size [1]" in out
    assert "octavo COMMAND --help" in out


def test_without_a_command_the_help_is_shown(octavo):
    code, _, err = octavo()
    assert code == 2
    assert "octavo COMMAND --help" in err


def test_a_command_runs_with_its_own_options(octavo):
    assert octavo("greet", "world", "--times", "2")[:2] == (0, "hello world hello world \n")


def test_a_commands_help_is_its_own(octavo):
    code, out, _ = octavo("greet", "-h")
    assert code == 0
    assert "octavo greet" in out
    assert "Say hello to NAME." in out
    assert "--times" in out


def test_a_group_has_subcommands(octavo):
    assert octavo("group", "fast")[:2] == (0, "fast it is\n")
    assert "octavo group" in octavo("group", "--help")[1]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["capacity-error"], 1, "error: no page left\n"),
        (["missing-file"], 1, "error: No such file or directory: /no/such/file\n"),
        (["plain-os-error"], 1, "error: the disk is unhappy\n"),
        (["bug"], 1, "error: KeyError: 'oops'\nThis is a bug in octavo."),
        (["group", "fail"], 1, "error: KeyError: 'oops'\nThis is a bug in octavo."),
        (["absent"], 1, "error: ModuleNotFoundError: No module named 'planted_nowhere'\nThis is"),
        (["interrupt"], 130, "error: interrupted\n"),
        (["exit-text"], 1, "error: stopped\n"),
        (["exit-3"], 3, ""),
        (["abort"], 1, "Aborted"),
        (["wrong-usage"], 2, "not with that"),
        (["greet"], 2, "Missing argument"),
        (["greet", "x", "--times", "many"], 2, "--times"),
        (["graet"], 2, "Did you mean 'greet'?"),
        (["--nonsense"], 2, "No such option"),
    ],
    ids=str,
)
def test_exit_codes_and_messages(octavo, args, code, message):
    actual, out, err = octavo(*args)
    assert (actual, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


def test_an_error_text_cannot_style_or_steer_the_terminal(octavo):
    message = r"error: margin must be positive, got [red]-1[/red] :boom:\x1b[2J\udcff"
    assert octavo("config-error") == (1, "", message + "\n")


def test_a_broken_pipe_is_quiet(octavo):
    assert octavo("broken-pipe") == (1, "", "")


@pytest.mark.parametrize("command", ["config-error", "bug"])
@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_shows_the_traceback(octavo, monkeypatch, command, how):
    if how == "variable":
        monkeypatch.setenv("OCTAVO_DEBUG", "1")
    code, _, err = octavo(*(["--debug"] if how == "flag" else []), command)
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert "test_main.py" in err
    assert "error: " in err
    assert "\x1b[2J" not in err


def test_registered_commands_exist():
    for command in COMMANDS:
        assert command.load().name == command.name
        assert command.help.endswith(".")
        assert command.example.startswith("octavo ") or not command.example


def test_names_are_unique():
    names = [command.name for command in COMMANDS]
    assert len(set(names)) == len(names)


def test_main_ends_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["octavo", "--version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().out == f"octavo {__version__}\n"


def test_main_survives_a_reader_that_is_gone(monkeypatch, tmp_path):
    class Gone:
        def flush(self):
            raise BrokenPipeError

        def fileno(self):
            return descriptor

    descriptor = os.open(tmp_path / "stdout", os.O_CREAT | os.O_WRONLY)
    monkeypatch.setattr(sys, "argv", ["octavo", "--nonsense"])
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert os.write(descriptor, b"x") == 1  # to /dev/null now
    os.close(descriptor)
    assert (tmp_path / "stdout").read_bytes() == b""


def process(*args: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=60, **kwargs
    )


def test_python_m_octavo():
    done = process("-m", "octavo", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"octavo {__version__}\n", "")


def test_help_needs_no_torch():
    code = (
        "import sys; sys.argv = ['octavo', '--help']\n"
        "from octavo.cli.main import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'numpy', 'triton', 'transformers'} & set(sys.modules)"
    )
    done = process("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "octavo COMMAND --help" in done.stdout


@pytest.mark.parametrize("args", ["--help", "--version"])
def test_a_closed_pipe_leaves_no_trace(args):
    command = f"({sys.executable} -m octavo {args}; echo code $? >&2) | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr in ("code 0\n", "code 1\n")

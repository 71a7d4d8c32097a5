"""`--help` in a terminal of 80 columns: whole option names, commands that can be copied."""

import re

import pytest

from octavo.cli.main import COMMANDS, make_app, run


def nodes(command, path):
    """A command and all below it, each with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from nodes(child, (*path, name))


NODES = {
    " ".join(path): command for row in COMMANDS for path, command in nodes(row.load(), (row.name,))
}


@pytest.fixture
def help_of(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def call(*path: str) -> str:
        assert run(make_app(COMMANDS), [*path, "--help"]) == 0
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", NODES)
def test_option_names_are_whole(help_of, name):
    text = help_of(*name.split())
    # Lines that begin with a dash list options; texts may mention others.
    lines = re.findall(r"^\W*?(-.*)", text, flags=re.MULTILINE)
    listed = re.findall(r"(?<![\w-])--?\w[\w-]*(?!…)\b", "\n".join(lines))
    for parameter in NODES[name].params:
        if parameter.param_type_name == "option":
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert option in listed


@pytest.mark.parametrize("name", NODES)
def test_lines_fit_but_for_commands_to_copy(help_of, name):
    for line in help_of(*name.split()).splitlines():
        assert len(line) <= 80 or line.startswith("  octavo ")


@pytest.mark.parametrize("name", ["", "bench", "eval"])
def test_lists_of_commands_are_not_cut(help_of, name):
    text = " ".join(help_of(*name.split()).split())
    assert "..." not in text.partition("Commands:")[2]
    for row in COMMANDS if not name else ():
        assert row.help in text
        assert row.example in text


def test_an_example_is_one_line(help_of):
    lines = help_of("serve").splitlines()
    command = "octavo serve path/to/model --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers "
    assert f"  {command}sliding_window" in lines


def test_brackets_are_shown_as_they_are(help_of):
    text = help_of("bench", "sweep")
    assert "\n  [engine] " in text and "\n  [[latency]] " in text

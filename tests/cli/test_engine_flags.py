"""Flags of an engine to its settings, and back to the command that repeats a measurement."""

import shlex

from octavo.cli.engine_flags import command_line, make_settings
from octavo.serving.engine.settings import EngineSettings


def test_a_command_leaves_out_what_was_not_given():
    flags = {"--a": None, "--b": False, "--c": True, "--d": ["x", "y z"], "--e": [], "--f": 0}
    line = command_line("latency", ["my model"], flags)
    assert line == "octavo bench latency 'my model' --c --d x --d 'y z' --f 0"
    assert shlex.split(line)[3] == "my model"


def test_settings_of_flags():
    made = make_settings(enforce_eager=False, compile=False, num_pages=3, page_size=16)
    assert made == EngineSettings(num_pages=3, page_size=16)


def test_graphs_and_compiling():
    assert make_settings(enforce_eager=True, compile=True) == EngineSettings(
        cuda_graphs=False, compile=True
    )

"""Flags of an engine to its settings, and back to the command that repeats a measurement."""

import dataclasses
import shlex

import pytest

from octavo.cli.engine_flags import command_line, make_settings
from octavo.errors import UnsupportedError
from octavo.serving.engine import settings as engine_settings
from octavo.serving.engine.settings import EngineSettings


def test_a_command_leaves_out_what_was_not_given():
    flags = {"--a": None, "--b": False, "--c": True, "--d": ["x", "y z"], "--e": [], "--f": 0}
    line = command_line("latency", ["my model"], flags)
    assert line == "octavo bench latency 'my model' --c --d x --d 'y z' --f 0"
    assert shlex.split(line)[3] == "my model"


def test_settings_of_flags():
    made = make_settings(enforce_eager=False, compile=False, num_pages=3, page_size=16)
    assert made == EngineSettings(num_pages=3, page_size=16)


def use_settings(monkeypatch: pytest.MonkeyPatch, made: type):
    monkeypatch.setattr(engine_settings, "EngineSettings", made)


def test_graphs_and_compiling_where_the_engine_has_them(monkeypatch):
    @dataclasses.dataclass
    class Settings:
        cuda_graphs: bool | None = None
        compile: bool = False

    use_settings(monkeypatch, Settings)
    assert make_settings(enforce_eager=True, compile=True) == Settings(False, True)
    assert make_settings(enforce_eager=False, compile=False) == Settings()


def test_compiling_is_refused_where_it_has_not(monkeypatch):
    @dataclasses.dataclass
    class Settings:
        num_pages: int = 1

    use_settings(monkeypatch, Settings)
    assert make_settings(enforce_eager=True, compile=False) == Settings()
    with pytest.raises(UnsupportedError, match="leave --compile out"):
        make_settings(enforce_eager=False, compile=True)

"""Every script of examples/ runs on a CPU, says what it is for, and is listed."""

import ast
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
SLOW = {"server_client.py"}  # starts a server


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=script.name, marks=[pytest.mark.slow] * (script.name in SLOW))
        for script in SCRIPTS
    ],
)
def test_the_script_runs(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out  # it shows something
    assert not list(tmp_path.iterdir())  # and leaves nothing behind


def test_every_script_is_short_and_listed():
    listed = (FOLDER / "README.md").read_text()
    assert len(SCRIPTS) >= 9
    for script in SCRIPTS:
        text = script.read_text()
        assert ast.get_docstring(ast.parse(text)), script
        assert len(text.splitlines()) <= 60, script
        assert f"({script.name})" in listed, script

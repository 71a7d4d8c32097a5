"""README's tables are what the records say."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_readme.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("update_readme", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_agrees_with_the_records(script):
    assert script.main(["--check"]) == 0


def test_a_changed_figure_is_noticed(script, tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(script.README.read_text().replace("| 131,072 |", "| 131,073 |"))
    monkeypatch.setattr(script, "README", readme)
    assert script.main(["--check"]) == 1
    assert "do: python scripts/update_readme.py" in capsys.readouterr().out
    assert script.main([]) == 0
    assert readme.read_text() == (SCRIPT.parents[1] / "README.md").read_text()

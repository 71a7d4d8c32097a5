"""The tables of README and docs are what the records say."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_tables.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_agree_with_the_records(script):
    assert script.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("file", "figure"), [("docs/numerics.md", "| 131,072 |"), ("README.md", "| decode, 8 × 128k")]
)
def test_a_changed_figure_is_noticed(script, file, figure, tmp_path, monkeypatch, capsys):
    original, copy = SCRIPT.parents[1] / file, tmp_path / "copy.md"
    assert figure in original.read_text()
    copy.write_text(original.read_text().replace(figure, figure.replace("1", "7")))
    monkeypatch.setattr(script, "FILES", (copy,))
    assert script.main(["--check"]) == 1
    assert "do: python scripts/update_tables.py" in capsys.readouterr().out
    assert script.main([]) == 0
    assert copy.read_text() == original.read_text()

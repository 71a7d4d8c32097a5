"""octavo bench diffusion."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure.bench import diffusion
from octavo.measure.records import Measurement


def octavo(*arguments: str) -> int:
    return run(make_app(COMMANDS), ["bench", "diffusion", *arguments])


def test_records_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diffusion, "time_alone", lambda *_, **__: {"median_ms": 1.0})
    flags = ["--config", "tiny-wan", "--recipes", "bf16,linear", "--no-compile", "--json"]
    assert octavo(*flags) == 0
    lines = capsys.readouterr().out.splitlines()
    records = [Measurement.from_json(line) for line in lines]
    assert [r.case["recipe"] for r in records] == ["bf16", "linear"]
    assert records[0].command.endswith("--recipes bf16,linear --no-compile")


def test_a_size_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("--config", "huge") != 0
    assert "expected a size of flux.1-dev" in capsys.readouterr().err


def test_a_recipe_that_is_wrong_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diffusion, "time_alone", lambda *_, **__: {"median_ms": 1.0})
    monkeypatch.setattr(diffusion, "MAX_LINEAR_ERROR", 1e-3)
    assert octavo("--config", "tiny-wan", "--recipes", "bf16,linear", "--no-compile") == 1
    said = capsys.readouterr()
    assert "expected every recipe to run and be right, got linear: linear is wrong" in (
        said.err.replace("\n", " ")
    )
    assert "Not measured here" in said.out

"""octavo doctor on this machine."""

import platform

import torch

from octavo.cli.main import COMMANDS, make_app, run
from octavo.ops.select import OPS


def doctor(capsys):
    assert run(make_app(COMMANDS), ["doctor"]) == 0
    return capsys.readouterr().out


def test_names_versions_and_every_op(capsys):
    text = doctor(capsys)
    assert platform.python_version() in text
    assert torch.__version__ in text
    assert all(op in text for op in OPS)
    assert "plain torch runs on any device" in text


def test_reports_a_misspelt_variable(capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_DEBUGG", "1")
    text = doctor(capsys)
    assert "OCTAVO_DEBUGG is set, but octavo has no such variable" in text


def test_says_which_gpu(capsys):
    text = doctor(capsys)
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name() in text
    else:
        assert "none that torch can use" in text

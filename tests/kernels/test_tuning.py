"""Tuned settings: found by GPU and problem, written so that a crash loses nothing."""

import json
from dataclasses import dataclass, fields

import pytest

from octavo.errors import ConfigError
from octavo.kernels import tuning
from octavo.kernels.append_kv.config import AppendConfig
from octavo.kernels.attention.config import AttentionConfig
from octavo.kernels.device import CPU, Device
from octavo.kernels.quantize.config import QuantizeConfig
from octavo.kernels.scaled_mm.config import StreamConfig

H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
KINDS = {
    "append_kv": AppendConfig,
    "attention": AttentionConfig,
    "quantize": QuantizeConfig,
    "scaled_mm": StreamConfig,
}


@dataclass(frozen=True)
class Settings:
    block: int
    num_warps: int = 4


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning._read.cache_clear()
    yield tmp_path
    tuning._read.cache_clear()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "h200.json"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm4_80gb.json"),
        ("NVIDIA GeForce RTX 4090", "geforce_rtx_4090.json"),
    ],
)
def test_the_file_of_a_gpu(name, expected):
    assert tuning.file_name(Device("cuda", name, (9, 0))) == expected


def test_what_was_saved_is_found(folder):
    assert tuning.find("op", "a", H200, Settings) is None
    tuning.save("op", "a", H200, Settings(64), folder)
    tuning.save("op", "b", H200, Settings(32, 8), folder)
    tuning.save("other", "a", H200, Settings(16), folder)
    tuning.save("op", "a", H200, Settings(128), folder)
    assert tuning.find("op", "a", H200, Settings) == Settings(128)
    assert tuning.find("op", "b", H200, Settings) == Settings(32, 8)
    assert tuning.find("op", "c", H200, Settings) is None
    assert tuning.find("op", "a", Device("cuda", "L4", (8, 9)), Settings) is None
    assert [path.name for path in folder.iterdir()] == ["h200.json"]


def test_the_first_winner_makes_the_folder(folder):
    path = tuning.save("op", "a", H200, Settings(64), folder / "new")
    assert path == folder / "new" / "h200.json" and path.is_file()


def test_a_cpu_has_nothing_tuned(folder):
    assert tuning.find("op", "a", CPU, Settings) is None


def test_a_broken_file_is_named(folder):
    (folder / "h200.json").write_text("{")
    with pytest.raises(ConfigError, match=r"expected tuned settings as JSON in .*h200.json"):
        tuning.find("op", "a", H200, Settings)


def test_settings_of_another_version_are_named(folder):
    (folder / "h200.json").write_text('{"op": {"a": {"block": 1, "stages": 2}}}')
    with pytest.raises(ConfigError, match="expected block, num_warps for op 'a' .* tune again"):
        tuning.find("op", "a", H200, Settings)


def test_shipped_files_hold_settings_of_their_ops():
    for path in tuning.FOLDER.glob("*.json"):
        for op, rows in json.loads(path.read_text()).items():
            names = {field.name for field in fields(KINDS[op])}
            for row in rows.values():
                assert set(row) == names
                KINDS[op](**row)

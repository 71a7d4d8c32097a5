"""vLLM's engine beside ours, by a stand-in that runs the same weights in a process of its own."""

import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from octavo.errors import ConfigError
from octavo.measure.bench import vllm_engine
from octavo.measure.bench.cases import LatencyCase, ThroughputCase
from octavo.measure.bench.engine import make_rows, open_subject
from octavo.measure.bench.engine_load import run_load
from octavo.measure.bench.vllm_engine import (
    Installation,
    is_by_plug_in,
    twin_rows,
    weights_for_vllm,
)
from octavo.measure.report.latency import latency_sections
from octavo.measure.rows import ENGINE, parse_rows
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.fake_vllm import write_fake_vllm

CASE = LatencyCase(input_lens=(5, 20), output_len=3, num_iters=2)


@pytest.fixture(scope="module")
def subject():
    return open_subject(None, "tiny", dtype="float32", device="cpu", layers=None)


def run(subject, vllm, case=CASE, names=("auto",), **options):
    rows = make_rows(names, subject)
    return run_load(subject, rows, case, EngineSettings(), command="x", vllm=vllm, **options)


def test_latency_beside_ours(subject, tmp_path):
    vllm, seen = Installation.find(write_fake_vllm(tmp_path)), []
    result = run(subject, vllm, on_step=seen.append)
    assert not result.failures
    ours, theirs = ([r for r in result.records if r.impl == impl] for impl in ("octavo", "vllm"))
    assert [r.op for r in ours] == [r.op for r in theirs] == ["latency", "latency", "latency_fit"]
    assert len(seen) == 2 * CASE.num_runs and seen[-1] == "vllm, 20 tokens"
    for record in theirs:
        assert record.case["row"] == "vllm" and record.baseline == "auto"
        assert record.case["vllm"] == "0.0.fake" and record.case["page_size"] == 16
        assert record.case["cuda_graphs"] == "FULL" and record.case["compile"] is True
    for own, other in zip(ours[:2], theirs[:2], strict=True):
        assert other.values["relative_rms"] < 1e-5  # the same weights, prompts and check
        ratio = own.values["median_itl_ms"] / other.values["median_itl_ms"]
        assert other.values["itl_speedup"] == ratio
        assert other.values["num_itl_samples"] == own.values["num_itl_samples"] == 4
    # Both in one section, although their engines have other settings.
    (section,) = latency_sections(result.records)
    assert [row[0] for row in section.tables[0].rows] == ["auto", "vllm"]


@pytest.mark.slow
def test_throughput_beside_ours(subject, tmp_path):
    case = ThroughputCase(num_prompts=3, input_len=6, output_len=4, max_concurrency=2)
    vllm, seen = Installation.find(write_fake_vllm(tmp_path)), []
    ours, theirs = run(subject, vllm, case, on_step=seen.append).records
    assert theirs.values["total_output_tokens"] == ours.values["total_output_tokens"] == 12
    assert theirs.values["completed"] == 3 and theirs.case["max_num_seqs"] == 2
    assert "num_preemptions" in ours.values and "num_preemptions" not in theirs.values
    gain = theirs.values["output_throughput"] / ours.values["output_throughput"]
    assert theirs.values["output_throughput_gain"] == gain
    assert seen.count("vllm, tokens") == 12


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("dies", "ended with 3:\nthe fake is dying", marks=pytest.mark.slow),
        ("refuses", "ValueError: no such model"),
        pytest.param("is wrong", "vllm is wrong", marks=pytest.mark.slow),
    ],
)
def test_vllm_that_fails_has_no_records_and_ours_stay(subject, tmp_path, fault, said):
    result = run(subject, Installation.find(write_fake_vllm(tmp_path, fault)))
    assert {record.impl for record in result.records} == {"octavo"}
    assert list(result.failures) == ["vllm"] and said in result.failures["vllm"]


def test_vllm_runs_every_kind_of_row_once():
    names = ["auto", "fp8", "fp8+head", "auto+linear", "fp8+linear", "auto+linear=weights"]
    twins = twin_rows(parse_rows(names, ENGINE))
    assert [row.name for row in twins] == ["vllm", "vllm+fp8", "vllm+linear", "vllm+fp8+linear"]
    assert [row.kv_cache is not None for row in twins] == [False, True, False, True]
    assert [row.linear is not None for row in twins] == [False, False, True, True]


def test_the_plug_in_runs_every_kind_of_row_too():
    twins = twin_rows(parse_rows(["auto", "fp8+linear"], ENGINE), has_plug_in=True)
    names = ["vllm", "vllm+fp8+linear", "vllm+octavo", "vllm+octavo+fp8+linear"]
    assert [row.name for row in twins] == names
    assert [is_by_plug_in(row) for row in twins] == [False, False, True, True]
    assert [str(row.linear.weight) for row in twins[1::2]] == ["tensor", "channel"]


@pytest.mark.slow
def test_rows_of_the_plug_in_have_it(subject, tmp_path):
    """Other rows have none, or their records would name it."""
    vllm = replace(Installation.find(write_fake_vllm(tmp_path)), has_plug_in=True)
    row = twin_rows(parse_rows(["auto"], ENGINE), has_plug_in=True)[1]
    settings = EngineSettings(max_context=16)
    with (
        weights_for_vllm(subject) as folder,
        vllm_engine.open_vllm(vllm, subject, folder, row, settings) as engine,
    ):
        about = engine.about
    assert about["vllm"] == "0.0.fake+octavo.integrations.vllm.plugin:CUSTOM"


def test_an_environment_of_vllm_gets_this_octavo_and_no_other_package(tmp_path):
    row = twin_rows(parse_rows(["auto"], ENGINE), has_plug_in=True)[1]
    vllm = Installation(Path(sys.executable), has_plug_in=True)
    environment = vllm.environment(row, is_cuda=True, folder=tmp_path)
    assert environment["PYTHONPATH"] == str(tmp_path) and environment["VLLM_PLUGINS"] == "octavo"
    code = (
        "import octavo; from importlib.metadata import entry_points as e\n"
        "print(octavo.__file__, *(x.value for x in e(group='vllm.general_plugins')))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True
    )
    entry = "octavo.integrations.vllm.plugin:register"
    assert done.stdout.split() == [str(tmp_path / "octavo/__init__.py"), entry], done.stderr


@pytest.mark.slow
def test_fp8_rows_are_asked_of_vllm(subject, tmp_path, monkeypatch):
    asked = []
    start = vllm_engine.VllmEngine.start

    def note(self, settings, memory_fraction):
        asked.append((settings["kv_cache_dtype"], settings["quantization"], settings["dtype"]))
        start(self, settings, memory_fraction)

    monkeypatch.setattr(vllm_engine.VllmEngine, "start", note)
    run(subject, Installation.find(write_fake_vllm(tmp_path)), names=("auto", "fp8+linear"))
    assert asked == [("auto", None, "float32"), ("fp8", "fp8", "float32")]


def test_where_vllm_is(tmp_path, monkeypatch):
    assert Installation.find(tmp_path) is None
    packages = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "vllm"
    packages.mkdir(parents=True)
    (packages / "__init__.py").touch()
    assert Installation.find(tmp_path) == Installation(tmp_path / "env" / "bin" / "python")
    assert Installation.find(tmp_path / "env").python == tmp_path / "env" / "bin" / "python"


def test_a_bundle_is_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "peers").mkdir()
    source = write_fake_vllm(tmp_path / "source")
    with tarfile.open(tmp_path / "peers" / "vllm.tar.xz", "w:xz") as archive:
        archive.add(source / "site", "site")
    found = Installation.find(tmp_path / "peers")
    assert (found.first / "vllm" / "__init__.py").exists()
    assert found == Installation.find(tmp_path / "peers")
    (unpacked,) = (tmp_path / "tmp").iterdir()
    assert found.first == unpacked / "site"


def test_weights_that_do_not_fit_the_disk(subject, monkeypatch):
    usage = vllm_engine.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(vllm_engine.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="set TMPDIR"), weights_for_vllm(subject):
        pass


def test_weights_of_a_checkpoint_stay_where_they_are(subject, monkeypatch):
    monkeypatch.setattr(subject.model, "name_or_path", "some/folder")
    with weights_for_vllm(replace(subject, is_random=False)) as folder:
        assert folder == "some/folder"

"""octavo eval images: from a small image model to a table, records and a sheet."""

from pathlib import Path

import pytest
import torch

from octavo import ScaleSet, quantize_, save_scales
from octavo.calibration.scale_file import ScaleHeader
from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
pytest.importorskip("PIL")
from octavo.demo.small_image import (
    load_small_image_model,
    make_small_image_model,
    save_small_image_model,
)

TINY = {
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model whose blocks do something, unlike those of a new one."""
    folder = tmp_path_factory.mktemp("small")
    made = make_small_image_model(["dog", "cat", "on", "blue"], **TINY)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.transformer.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    save_small_image_model(made, folder)
    return str(folder)


def octavo(*args):
    return run(make_app(COMMANDS), ["eval", "images", *map(str, args)])


def draw(model, *args):
    prompts = ("--prompt", "dog", "--prompt", "cat on blue", "--num-inference-steps", 2)
    return octavo(model, *prompts, "--device", "cpu", *args)


def test_rows_become_a_table_records_and_a_sheet(capsys, model, tmp_path):
    path, folder = tmp_path / "records.jsonl", tmp_path / "pictures"
    rows = ("--row", "bf16", "--row", "fp8", "--row", "fp8+attention+ignore=ff")
    assert draw(model, *rows, "-o", path, "--save-pictures", folder, "--min-psnr", 20) == 0
    text = capsys.readouterr().out
    records = store.read(path)
    assert [r.case["row"] for r in records] == ["bf16", "fp8", "fp8+attention+ignore=ff"]
    assert all(str(r.case["row"]) in text for r in records) and "PSNR (dB)" in text
    assert "pip install lpips" in text.replace("\n", " ") and "--clip FOLDER" in text
    assert 20 < records[1].values["psnr_db"] < 100
    assert records[1].case["num_linear"] > records[2].case["num_linear"] > 0
    assert records[2].case["num_attention"] == 2 and records[1].case["num_attention"] == 0
    command = f"octavo eval images {model} --prompt dog --prompt 'cat on blue' --row bf16 --row fp8"
    assert all(r.command.startswith(command) for r in records)
    assert (folder / "sheet.png").is_file() and len(list(folder.rglob("0*.png"))) == 6
    # Pictures beside the first row, by their paths from the records file on.
    shown = [record.case.get("picture") for record in records]
    assert shown[:2] == [None, "pictures/compared_fp8.jpg"]
    assert all((tmp_path / name).is_file() for name in shown[1:])
    assert records[1].case["picture_prompts"] == "dog; cat on blue"


@pytest.mark.slow
def test_a_row_with_static_scales(model, tmp_path):
    """Scales far too large round everything to zero: they are those of the file."""
    plan = quantize_(load_small_image_model(Path(model)).transformer).layers["linear"]
    psnr = {}
    for scale in (0.05, 1e6):
        scales, path = tmp_path / f"{scale}.json", tmp_path / f"{scale}.jsonl"
        layers = {f"transformer.{name}": scale for name in plan}
        found = ScaleSet({}, ScaleHeader(kind="pipeline"), layers)
        save_scales(scales, found)
        assert draw(model, "--row", "bf16", "--row", f"static={scales}", "-o", path) == 0
        psnr[scale] = store.read(path)[1].values["psnr_db"]
    assert psnr[0.05] > psnr[1e6] + 3


def test_the_gate_fails_with_its_reason(capsys, model, tmp_path):
    path = tmp_path / "records.jsonl"
    assert draw(model, "--row", "bf16", "--row", "fp8", "--min-psnr", 99, "-o", path) == 1
    assert "row fp8: expected a mean PSNR of 99 dB or more against bf16" in capsys.readouterr().err
    assert len(store.read(path)) == 2  # a failure is a result, too


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--row", "bf16", "--row", "int8"),
            "row int8: expected words out of bf16, fp16, fp32, auto, baseline, fp8",
        ),
        (("--row", "fp8"), "two different rows or more"),
        (("--dtype", "float32", "--row", "bf16", "--row", "fp8"), "rows in float32"),
        (("--dtype", "auto"), "expected a dtype, one of bfloat16, float16, float32, got 'auto'"),
        (("-o", "no/such/folder.jsonl"), "existing folder"),
        (("--prompts", __file__), "--prompts FILE or --prompt TEXT, got both"),
        (("--device", "tpu"), "got 'tpu'"),
        (("--clip", "."), ".: expected weights"),
        (("--row", "bf16", "--row", "fp8+ignore=img_mlp"), "img_mlp"),
        (("--prompt", "cta"), "did you mean cat"),
    ],
)
def test_wrong_requests_are_one_sentence(capsys, model, monkeypatch, tmp_path, args, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert draw(model, *args) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_another_model_needs_prompts(capsys, tmp_path):
    assert octavo(tmp_path) == 1
    assert "--prompts FILE" in capsys.readouterr().err


def test_without_diffusers_the_extra_is_named(capsys, model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert draw(model) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "octavo eval images needs diffusers" in error and "[diffusers]'" in error


def test_help_teaches(capsys):
    assert octavo("--help") == 0
    text = capsys.readouterr().out
    assert "fp8+attention" in text and "LPIPS" in text

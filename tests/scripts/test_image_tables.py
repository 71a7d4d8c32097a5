"""The table of diffusion models, from records made up."""

import importlib.util
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.records import Machine, Measurement

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_tables.py"
CPU, H200 = Machine.current(), Machine.current(gpu="NVIDIA H200", capability=(9, 0))
CASE = {
    "model": "small-image",
    "dtype": "bfloat16",
    "num_pictures": 16,
    "num_inference_steps": 20,
    "seed": 0,
    "prompts_sha256": "0123456789abcdef",
    "height": 48,
    "width": 64,
}
SCORES = {"psnr_db": 31.26, "worst_psnr_db": 27.04, "ssim": 0.98765, "worst_ssim": 0.9}


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TABLES


@pytest.fixture
def images(tables):
    return tables["images"]


@pytest.fixture
def modulation(tables):
    return tables["modulation"]


def record(row, values, *, day=1, machine=CPU, **case):
    return Measurement(
        op="images",
        impl="diffusers",
        case={**CASE, **case, "row": row},
        values=values,
        machine=machine,
        command="x",
        baseline=None if row == "bf16" else "bf16",
        date=f"2026-11-{day:02d}T00:00:00Z",
    )


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_no_record_is_a_sentence(images, tmp_path):
    text = images(tmp_path)
    assert "No model has a record yet" in text and "|" not in text
    store.append(tmp_path / "images_cpu.jsonl", [record("bf16", {})])
    assert images(tmp_path) == text  # nothing is compared


def test_a_row_has_its_means_and_the_worst(images, tmp_path):
    store.append(tmp_path / "images_cpu.jsonl", [record("bf16", {}), record("fp8", SCORES)])
    (head, row) = rows_of(images(tmp_path))
    assert head[:3] == ["model", "row", "PSNR (dB)"]
    drawn = "16 × 64 × 48, 20 steps, on a CPU"
    scores = ["31.3 (27.0)", "0.9877 (0.9000)", "–", "–"]
    assert row == ["small-image", "`fp8`", *scores, drawn]


def test_scores_that_were_taken_are_there(images, tmp_path):
    more = {"lpips": 0.0123, "worst_lpips": 0.2, "clip_score": 30.5, "worst_clip_score": 20.0}
    plain = record("bf16", {"clip_score": 31.0, "worst_clip_score": 21.0}, num_frames=9)
    store.append(
        tmp_path / "images_h200.jsonl",
        [plain, record("fp8", SCORES | more, machine=H200, num_frames=9)],
    )
    # Drawn elsewhere, the BF16 pictures are not those that were compared.
    assert rows_of(images(tmp_path))[1][4:6] == ["0.0123 (0.2000)", "30.50"]
    store.append(
        tmp_path / "images_h200.jsonl",
        [record("bf16", {"clip_score": 31.0}, machine=H200, num_frames=9)],
    )
    row = rows_of(images(tmp_path))[1]
    assert row[5] == "30.50 (bf16: 31.00)"
    assert row[6] == "16 × 9 frames of 64 × 48, 20 steps, on NVIDIA H200"


def test_the_newest_record_of_each_row_counts(images, tmp_path):
    store.append(
        tmp_path / "images_cpu.jsonl",
        [
            record("fp8", SCORES | {"psnr_db": 33.0}, day=3),
            record("fp8", SCORES | {"psnr_db": 32.0}, day=2),
            record("fp8+attention", SCORES, day=1),
            record("fp8", SCORES, day=1, num_inference_steps=4),
        ],
    )
    found = [(row[1], row[2][:4], row[6].split(", ")[1]) for row in rows_of(images(tmp_path))[1:]]
    assert found == [
        ("`fp8`", "33.0", "20 steps"),
        ("`fp8+attention`", "31.3", "20 steps"),
        ("`fp8`", "31.3", "4 steps"),
    ]


def test_records_of_other_things_are_left_out(images, tmp_path):
    other = Measurement(
        op="small_image_score", impl="bf16", case={}, values={}, machine=CPU, command="x"
    )
    store.append(tmp_path / "images_cpu.jsonl", [other, record("fp8", SCORES)])
    assert len(rows_of(images(tmp_path))) == 2


def test_weight_only_modulation_is_apart(images, modulation, tmp_path):
    records = [record("bf16", {}), record("fp8+weight_only=modulation", SCORES)]
    store.append(tmp_path / "modulation_cpu.jsonl", records)
    assert "No model has a record yet" in images(tmp_path)
    (header, row) = rows_of(modulation(tmp_path))
    assert header == ["model", "row", "PSNR (dB)", "SSIM", "images"]
    assert row[1:3] == ["`fp8+weight_only=modulation`", "31.3 (27.0)"]

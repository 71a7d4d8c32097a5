"""PSNR and SSIM against their definitions, and LPIPS with and without its package."""

import math
import sys
from dataclasses import FrozenInstanceError
from types import ModuleType

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo.measure.evaluate import image_scores
from octavo.measure.evaluate.image_scores import (
    GAP,
    LABEL,
    LINE,
    MAX_PSNR_DB,
    SIDE,
    ImageScores,
    compare_images,
    save_row,
    why_no_lpips,
)

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def fresh_lpips():
    image_scores._lpips_net.cache_clear()
    yield
    image_scores._lpips_net.cache_clear()


def noise(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def ssim_of_windows(a, b):
    """Wang et al. (2004), window by window."""
    x = np.arange(11) - 5
    line = np.exp(-(x**2) / (2 * 1.5**2))
    weights = np.outer(line, line) / np.outer(line, line).sum()
    found = []
    for color in range(3):
        for top in range(a.shape[1] - 10):
            for left in range(a.shape[2] - 10):
                p = a[color, top : top + 11, left : left + 11].double().numpy()
                q = b[color, top : top + 11, left : left + 11].double().numpy()
                mean_p, mean_q = (weights * p).sum(), (weights * q).sum()
                var_p = (weights * (p - mean_p) ** 2).sum()
                var_q = (weights * (q - mean_q) ** 2).sum()
                both = (weights * (p - mean_p) * (q - mean_q)).sum()
                c1, c2 = 0.01**2, 0.03**2
                above = (2 * mean_p * mean_q + c1) * (2 * both + c2)
                found.append(above / ((mean_p**2 + mean_q**2 + c1) * (var_p + var_q + c2)))
    return float(np.mean(found))


def test_psnr_of_a_known_error():
    a = torch.full((2, 3, 16, 16), 0.5)
    b = a.clone()
    b[0] += 0.1
    b[1] -= 0.01
    scores = compare_images(a, b)
    assert scores.psnr_db == pytest.approx((20.0, 40.0), abs=1e-4)
    assert scores.mean_psnr_db == pytest.approx(30.0, abs=1e-4)


def test_ssim_is_that_of_the_paper():
    a = noise(2, 3, 14, 17)
    b = (a + 0.2 * noise(2, 3, 14, 17).flip(0)).clamp(0, 1)
    expected = [ssim_of_windows(x, y) for x, y in zip(a, b, strict=True)]
    scores = compare_images(a, b)
    assert scores.ssim == pytest.approx(expected, rel=1e-9)
    assert scores.mean_ssim == pytest.approx(np.mean(expected), rel=1e-9)
    assert len(set(expected)) == 2 and max(expected) < 0.99


def test_the_same_pictures_have_the_largest_psnr_and_one():
    a = noise(1, 3, 11, 11)
    scores = compare_images(a, a)
    assert scores.psnr_db == (MAX_PSNR_DB,) and math.isfinite(scores.mean_psnr_db)
    assert scores.ssim == pytest.approx((1.0,))


def test_pictures_in_16_bits_are_compared_exactly():
    a = noise(1, 3, 16, 16).bfloat16()
    assert compare_images(a, a.float()).psnr_db == (MAX_PSNR_DB,)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 17), "the same number of images"),
        (torch.zeros(2, 3, 16, 16), torch.zeros(1, 3, 16, 16), "the same number of images"),
        (torch.zeros(3, 16, 16), torch.zeros(3, 16, 16), "the same number of images"),
        (torch.zeros(0, 3, 16, 16), torch.zeros(0, 3, 16, 16), "the same number of images"),
        (torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16), "the same number of images"),
        (torch.zeros(1, 3, 16, 10), torch.zeros(1, 3, 16, 10), "11 × 11 pixels or more"),
        (torch.zeros(1, 3, 16, 16), torch.full((1, 3, 16, 16), math.nan), "768 NaN or Inf"),
        (torch.full((1, 3, 16, 16), math.inf), torch.zeros(1, 3, 16, 16), "768 NaN or Inf"),
        (torch.zeros(1, 3, 16, 16), torch.full((1, 3, 16, 16), 1.5), "0 to 1, got 1.5 to 1.5"),
        (torch.full((1, 3, 16, 16), -0.5), torch.zeros(1, 3, 16, 16), "got -0.5 to -0.5"),
        (torch.zeros(1, 3, 16, 16).byte(), torch.zeros(1, 3, 16, 16).byte(), "divide by 255"),
    ],
)
def test_what_cannot_be_compared_raises(a, b, message):
    with pytest.raises(ConfigError, match=message):
        compare_images(a, b)


def test_without_its_package_lpips_is_none_and_says_so(monkeypatch):
    monkeypatch.setattr(image_scores, "find_spec", lambda name: None)
    a = noise(1, 3, 16, 16)
    scores = compare_images(a, a)
    assert scores.lpips is None and "lpips" not in scores.values()
    assert "pip install lpips" in scores.lpips_note
    assert "not asked for" in compare_images(a, a, lpips=False).lpips_note
    with pytest.raises(UnsupportedError, match="pip install lpips"):
        compare_images(a, a, lpips=True)


class MadeUp(torch.nn.Module):
    """Stands for the network: the largest difference of values in [-1, 1]."""

    def __init__(self, net, verbose):
        super().__init__()
        assert net == "alex" and not verbose

    def forward(self, x, y):
        assert x.dtype == torch.float32 and x.shape[0] == 1
        return (x - y).abs().max().reshape(1, 1, 1, 1)


def with_package(monkeypatch, kind):
    package = ModuleType("lpips")
    package.LPIPS = kind
    monkeypatch.setitem(sys.modules, "lpips", package)
    monkeypatch.setattr(image_scores, "find_spec", lambda name: package)


def test_lpips_is_taken_of_each_picture(monkeypatch):
    with_package(monkeypatch, MadeUp)
    a, b = torch.zeros(2, 3, 31, 40), torch.zeros(2, 3, 31, 40)
    b[1, 0, 0, 0] = 0.25
    assert why_no_lpips() is None
    scores = compare_images(a, b)
    assert scores.lpips == (0.0, 0.5) and scores.lpips_note is None
    assert scores.values()["lpips"] == 0.25


def test_weights_that_cannot_be_loaded_are_said(monkeypatch):
    def fail(**options):
        raise OSError("no network")

    with_package(monkeypatch, fail)
    a = torch.zeros(1, 3, 32, 32)
    assert "could not be loaded (no network)" in compare_images(a, a).lpips_note
    with pytest.raises(UnsupportedError, match="no network"):
        compare_images(a, a, lpips=True)


def test_pictures_too_small_for_lpips(monkeypatch):
    with_package(monkeypatch, MadeUp)
    a = torch.zeros(1, 3, 40, 30)
    scores = compare_images(a, a)
    assert scores.lpips is None and "needs 31 pixels on each side, got 30" in scores.lpips_note
    assert why_no_lpips(None, 30) == scores.lpips_note
    with pytest.raises(UnsupportedError, match="got 30"):
        compare_images(a, a, lpips=True)


def test_scores_are_frozen():
    with pytest.raises(FrozenInstanceError):
        ImageScores((1.0,), (1.0,)).ssim = ()


def plain(red, size=(24, 48)):
    picture = torch.zeros(1, 3, *size)
    picture[:, 0] = red
    return picture


def save_rows(folder, prompts, rows, records=None):
    """What the record of each row says."""
    return [save_row(folder, prompts, rows[: n + 1], records) for n in range(len(rows))]


def test_rows_are_below_each_other_and_prompts_side_by_side(tmp_path):
    rows = [("bf16", [plain(1.0), plain(0.2)]), ("fp8+ignore=a/b", [plain(0.6), plain(0.4)])]
    save_rows(tmp_path / "new", ["dog", "a very long prompt " * 9], rows)
    sheet = Image.open(tmp_path / "new" / "sheet.png")
    width, height = SIDE, SIDE // 2
    assert sheet.size == (LABEL + 2 * (width + GAP), LINE + 2 * (height + GAP))
    for row, reds in enumerate(((255, 51), (153, 102))):
        for column, red in enumerate(reds):
            place = (LABEL + column * (width + GAP) + 90, LINE + row * (height + GAP) + 40)
            assert sheet.getpixel(place) == (red, 0, 0)
    caption = sheet.crop((LABEL, 0, LABEL + width, LINE))
    label = sheet.crop((0, LINE, LABEL, LINE + height))
    assert min(caption.convert("L").tobytes()) < 50 and min(label.convert("L").tobytes()) < 50
    # Captions end where their pictures do.
    assert min(sheet.crop((sheet.width - GAP, 0, sheet.width, LINE)).convert("L").tobytes()) == 255


def test_every_picture_is_a_file(tmp_path):
    video = torch.cat((plain(1.0), plain(0.0)))
    save_rows(tmp_path, ["red/dog"], [("bf16", [video]), ("fp8+skip=../x", [video])])
    names = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.png"))
    assert names == ["0_bf16/000_red_dog.png", "1_fp8_skip=.._x/000_red_dog.png", "sheet.png"]
    first = Image.open(tmp_path / names[0])
    assert first.size == (48, 24) and first.getpixel((0, 0)) == (255, 0, 0)


def test_a_sheet_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(image_scores, "MAX_COLUMNS", 2)
    save_rows(tmp_path, ["a", "b", "c"], [("bf16", [plain(0.5)] * 3)])
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == LABEL + 2 * (SIDE + GAP)
    assert len(list(tmp_path.rglob("0*.png"))) == 3


def test_two_rows_are_compared_in_one_jpeg(tmp_path, monkeypatch):
    monkeypatch.setattr(image_scores, "MAX_COMPARED", 2)
    rows = [("bf16", [plain(1.0)] * 3), ("fp8+attention", [plain(0.2)] * 3)]
    said = save_rows(tmp_path / "new", ["a", "b", "c"], rows, tmp_path / "records.jsonl")
    about = {"picture": "new/compared_fp8_attention.jpg", "picture_prompts": "a; b"}
    assert said == [{}, about]
    path = tmp_path / "new" / "compared_fp8_attention.jpg"
    with Image.open(path) as sheet:
        assert sheet.format == "JPEG" and sheet.width == LABEL + 2 * (SIDE + GAP)
        above = sheet.getpixel((LABEL + 90, LINE + 40))
        below = sheet.getpixel((LABEL + 90, LINE + SIDE // 2 + GAP + 40))
    assert above[0] > 245 and abs(below[0] - 51) < 8
    assert list(path.parent.glob("*.jpg")) == [path]

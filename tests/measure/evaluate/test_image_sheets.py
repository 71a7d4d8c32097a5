"""Pictures on a sheet: where they are, and their files."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.measure.evaluate import image_scores
from octavo.measure.evaluate.image_scores import (
    GAP,
    LABEL,
    LINE,
    SIDE,
    save_compared,
    save_images,
)

Image = pytest.importorskip("PIL.Image")


def plain(red, size=(24, 48)):
    picture = torch.zeros(1, 3, *size)
    picture[:, 0] = red
    return picture


def test_rows_are_below_each_other_and_prompts_side_by_side(tmp_path):
    rows = [("bf16", [plain(1.0), plain(0.2)]), ("fp8+ignore=a/b", [plain(0.6), plain(0.4)])]
    path = save_images(tmp_path / "new", ["dog", "a very long prompt " * 9], rows)
    sheet = Image.open(path)
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
    save_images(tmp_path, ["red/dog"], [("bf16", [video]), ("fp8+skip=../x", [video])])
    names = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.png"))
    assert names == ["0_bf16/000_red_dog.png", "1_fp8_skip=.._x/000_red_dog.png", "sheet.png"]
    first = Image.open(tmp_path / names[0])
    assert first.size == (48, 24) and first.getpixel((0, 0)) == (255, 0, 0)


def test_a_sheet_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(image_scores, "MAX_COLUMNS", 2)
    path = save_images(tmp_path, ["a", "b", "c"], [("bf16", [plain(0.5)] * 3)])
    with Image.open(path) as sheet:
        assert sheet.width == LABEL + 2 * (SIDE + GAP)
    assert len(list(tmp_path.rglob("0*.png"))) == 3


def test_rows_of_other_lengths_raise(tmp_path):
    with pytest.raises(ConfigError, match="each of 2 prompts"):
        save_images(tmp_path, ["a", "b"], [("bf16", [plain(0.5)])])


def test_two_rows_are_compared_in_one_jpeg(tmp_path, monkeypatch):
    monkeypatch.setattr(image_scores, "MAX_COMPARED", 2)
    rows = [("bf16", [plain(1.0)] * 3), ("fp8+attention", [plain(0.2)] * 3)]
    path = save_compared(tmp_path / "new", ["a", "b", "c"], rows)
    assert path == tmp_path / "new" / "compared_fp8_attention.jpg"
    with Image.open(path) as sheet:
        assert sheet.format == "JPEG" and sheet.width == LABEL + 2 * (SIDE + GAP)
        above = sheet.getpixel((LABEL + 90, LINE + 40))
        below = sheet.getpixel((LABEL + 90, LINE + SIDE // 2 + GAP + 40))
    assert above[0] > 245 and abs(below[0] - 51) < 8
    assert list(path.parent.iterdir()) == [path]

"""Images from folders and files, and what is said of those that are none."""

import base64
import io
import json

import numpy as np
import pytest

from octavo import CheckpointError, ConfigError, UnsupportedError
from octavo.calibration.data import batches, open_images
from octavo.calibration.rows import read_parquet

Image = pytest.importorskip("PIL.Image")


def image(value, size=(8, 6)):
    """An image of one grey value, by which it is recognised."""
    return Image.fromarray(np.full((*size, 3), value, dtype=np.uint8))


def png(value):
    content = io.BytesIO()
    image(value).save(content, format="png")
    return content.getvalue()


def values(prompts):
    return [[np.asarray(x)[0, 0, 0].item() for x in prompt] for prompt in prompts]


def write_rows(path, rows):
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_a_folder_in_the_order_of_names(tmp_path):
    for name, value in (("b.png", 2), ("a.BMP", 1), ("c.webp", 3), ("d.jpg", 4)):
        image(value).save(tmp_path / name, **({"lossless": True} if name == "c.webp" else {}))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "folder.png").mkdir()
    found = open_images(str(tmp_path))
    assert found.num_prompts == 4
    assert values(found.prompts(100)) == [[1], [2], [3], [4]]
    assert values(found.prompts(3, start=1)) == [[2], [3]]
    assert values(found.prompts(2, start=2)) == []
    before = found.fingerprint
    image(5).save(tmp_path / "e.png")
    assert open_images(str(tmp_path)).fingerprint != before


def test_modes_become_rgb_and_images_upright(tmp_path):
    Image.new("RGBA", (4, 2)).save(tmp_path / "a.png")
    Image.new("L", (4, 2)).save(tmp_path / "b.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (4, 2)).save(tmp_path / "c.jpg", exif=exif)
    found = [prompt[0] for prompt in open_images(str(tmp_path)).prompts(3)]
    assert [x.mode for x in found] == ["RGB"] * 3
    assert [x.size for x in found] == [(4, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize("content", [b"", b"no image", png(1)[:-30]])
def test_a_damaged_image_is_named(tmp_path, content):
    image(0).save(tmp_path / "a.png")
    (tmp_path / "bad.png").write_bytes(content)
    prompts = open_images(str(tmp_path)).prompts(2)
    next(prompts)
    with pytest.raises(CheckpointError, match=r"bad\.png: expected an image"):
        next(prompts)


def test_an_empty_folder(tmp_path):
    with pytest.raises(ConfigError, match="in the folder .*, got none; subfolders"):
        open_images(str(tmp_path))


def test_jsonl_with_paths_base64_and_data_urls(tmp_path):
    image(1).save(tmp_path / "one.png")
    text = base64.b64encode(png(2)).decode()
    rows = [
        {"image": "one.png"},
        {"image": text, "question": "?"},
        {"images": [f"data:image/png;base64,{text}", "one.png"]},
        {"images": str(tmp_path / "one.png")},
    ]
    found = open_images(write_rows(tmp_path / "rows.jsonl", rows))
    assert values(found.prompts(10)) == [[1], [2], [2, 1], [1]]
    assert values(found.prompts(3, start=2)) == [[2, 1]]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"text": "?"}, CheckpointError, ":1: expected image or images, got only 'text'"),
        ({"image": "a", "images": []}, CheckpointError, "got both"),
        ({"images": []}, CheckpointError, "got an empty list"),
        ({"image": "gone.png"}, CheckpointError, "expected an image file, got none at 'gone.png'"),
        ({"image": "neither"}, CheckpointError, "the path of an image, or one in base64"),
        ({"image": 7}, CheckpointError, "expected an image or the path of one, got 7"),
        ({"image": "aGVsbG8="}, CheckpointError, ":1: expected an image: "),
        ({"image": "https://example.org/a.png"}, UnsupportedError, "expected an image at hand"),
        ([1], CheckpointError, "expected an object"),
    ],
)
def test_rows_that_hold_no_image(tmp_path, row, error, message):
    found = open_images(write_rows(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(error, match=message):
        list(found.prompts(1))


@pytest.mark.parametrize("content", [b'{"image": \n', b'{"image": "\xff"}'])
def test_a_line_that_is_no_json(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(CheckpointError, match=":1: expected JSON"):
        list(open_images(str(tmp_path / "rows.jsonl")).prompts(1))


@pytest.mark.parametrize("kind", ["bytes", "struct", "list"])
def test_parquet(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    contents = [png(value) for value in (1, 2, 3)]
    structs = [{"bytes": content, "path": None} for content in contents]
    columns = {
        "bytes": {"image": contents},
        "struct": {"image": structs},
        "list": {"images": [[structs[0]], structs[1:], [structs[2]]]},
    }
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns[kind]), path)
    found = open_images(str(path))
    expected = [[1], [2, 3], [3]] if kind == "list" else [[1], [2], [3]]
    assert values(found.prompts(10)) == expected
    assert values(found.prompts(10, start=1)) == expected[1:]


def test_parquet_from_any_row_on(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": list(range(40))}), path)
    for start in (0, 15, 16, 17, 32, 39, 40, 50):
        rows = list(read_parquet(path, start))
        assert [row.content["n"] for row in rows] == list(range(start, 40))
        assert [row.where for row in rows] == [f"{path}: row {n + 1}" for n in range(start, 40)]


def test_a_damaged_parquet_row_and_file(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image": [png(1), b"no image"]}), tmp_path / "rows.parquet")
    prompts = open_images(str(tmp_path / "rows.parquet")).prompts(2)
    next(prompts)
    with pytest.raises(CheckpointError, match="row 2: expected an image"):
        next(prompts)
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(CheckpointError, match="bad.parquet"):
        list(open_images(str(tmp_path / "bad.parquet")).prompts(1))


def test_a_data_set_that_cannot_be_reached(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def load(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ConfigError, match="VisionArena-Chat, which cannot be reached from here"):
        open_images("lmarena-ai/VisionArena-Chat")


def test_a_data_set_with_decoded_columns(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict(
        {"images": [[{"bytes": png(1), "path": None}], [{"bytes": png(2), "path": None}]]},
        features=datasets.Features({"images": datasets.List(datasets.Image())}),
    ).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    assert values(open_images("org/name").prompts(5)) == [[1], [2]]


@pytest.mark.parametrize("name", ["", "./gone", "/gone/images", "a/b/c", "gone.jsonl"])
def test_neither_a_folder_nor_a_name(name):
    with pytest.raises(ConfigError, match="expected a"):
        open_images(name)


def test_batches():
    assert [len(batch) for batch in batches(iter([[1]] * 5), 2)] == [2, 2, 1]
    assert list(batches(iter([]), 2)) == []
    with pytest.raises(ConfigError, match="batch_size from 1 on, got 0"):
        next(batches(iter([[1]]), 0))

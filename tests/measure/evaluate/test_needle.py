"""Needles: prompts of the right length, records of every cell, and what is recovered."""

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from octavo import LayerScales, Recipe, ScaleSet
from octavo.demo import retrieval_model as built
from octavo.errors import ConfigError
from octavo.measure.evaluate.answering import prompt_chunks
from octavo.measure.evaluate.language import (
    PLAIN_KEYS,
    local_rows,
    participants,
    recipe_digest,
)
from octavo.measure.evaluate.needle import (
    Grid,
    NeedlePrompt,
    PairHaystack,
    TextHaystack,
    calibration_of,
    make_workload,
    prompt_seed,
    split_sentences,
)
from octavo.measure.evaluate.requests import NeedleRequest
from octavo.measure.records import Machine
from octavo.measure.run import Participant, Records, run_workload
from octavo.measure.statistics import recovery

MODEL = SimpleNamespace(
    name="m",
    dtype="bf16",
    prompts=SimpleNamespace(about={}),
    model=SimpleNamespace(parameters=lambda: iter([torch.zeros(1)])),
)
GRID = Grid(lengths=(64, 32), depths=(0.0, 1.0), repetitions=4)


def count(text):
    return len(text.split())


def row(name, is_right=lambda prompt_number: True, calls=None):
    """A row that knows the answers: the value behind the key that is asked for."""

    def complete(asked):
        if calls is not None:
            calls.append(len(asked))
        answers = []
        for number, prompt in enumerate(asked):
            words = prompt.content.split()
            assert prompt.max_tokens == 1 and prompt.num_tokens == len(words)
            answer = words[words.index(words[-1]) + 1]
            answers.append(answer if is_right(number) else "nothing")
        return answers

    @contextmanager
    def answer():
        yield complete

    return Participant(name=name, impl="test", about={"model": "m"}, machine=MACHINE, open=answer)


MACHINE = Machine.current()


def evaluate(rows, grid=GRID, **options):
    return run_workload(rows, make_workload(grid, PairHaystack(), "c"), **options)


@pytest.mark.parametrize("length", [5, 6, 7, 64, 1001])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_pairs_have_the_length_and_the_needle_its_place(length, depth):
    prompt = PairHaystack().make(length, depth, seed=1)
    words = prompt.text.split()
    assert len(words) == length and words[0] == built.START and words[-2] == built.QUESTION
    key = words[-1]
    place = words.index(key)
    assert words.count(key) == 2 and words[place + 1] == prompt.answer
    num_pairs = (length - 3) // 2
    assert place == 1 + 2 * round(depth * (num_pairs - 1))
    assert set(words) <= set(built.WORDS)


def test_prompts_differ_by_seed_and_only_by_it():
    seeds = {prompt_seed(0, length, 0.5, i) for length in (64, 128) for i in range(5)}
    assert len(seeds) == 10
    one, same, other = (PairHaystack().make(64, 0.5, seed) for seed in (3, 3, 4))
    assert one == same and one.text != other.text


@pytest.mark.parametrize("num_keys", [1, 4])
def test_texts_fill_their_length_with_room_for_the_answer(num_keys):
    haystack = TextHaystack(count=count, num_added=1, num_keys=num_keys)
    for length in (150, 1000):
        prompt = haystack.make(length, 0.5, seed=2)
        used = count(prompt.text) + haystack.num_answer_tokens + 1
        assert length - 16 < used <= length
        assert prompt.text.count("The secret number of the") == num_keys + 1
        place = prompt.text.rsplit("The secret number of the ", 1)[1].split(",")[0]
        assert f"The secret number of the {place} is {prompt.answer}." in prompt.text


def test_depth_moves_the_needle_through_a_text():
    haystack = TextHaystack(count=count, num_keys=1)
    prompts = [haystack.make(800, depth, seed=5) for depth in (0.0, 0.5, 1.0)]
    places = [p.text.index(f"is {p.answer}.") / len(p.text) for p in prompts]
    assert places[0] < 0.2 and 0.4 < places[1] < 0.6 and places[2] > 0.85


def test_needles_are_hidden_in_a_given_text():
    sentences = split_sentences("Books have leaves.  Leaves have\npages! Do pages count? Yes.")
    assert sentences == ("Books have leaves.", "Leaves have pages!", "Do pages count?", "Yes.")
    text = TextHaystack(count=count, num_keys=1, filler=sentences).make(200, 0.5, seed=0).text
    assert "Leaves have pages!" in text and "The farmer" not in text
    with pytest.raises(ConfigError, match="a text with sentences"):
        split_sentences(" \n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PairHaystack().make(4, 0.0, 0), "prompts of 5 tokens or more, got 4"),
        (lambda: PairHaystack().make(64, 1.5, 0), "a depth of 0 to 1, got 1.5"),
        (lambda: TextHaystack(count=count).make(40, 0.0, 0), "room for 4 keys, got 40 tokens"),
        (lambda: TextHaystack(count=count, num_keys=91), "expected 1 to 90 keys, got 91"),
        (lambda: Grid(lengths=(8, 8), depths=(0.0,)), "different lengths"),
        (lambda: Grid(lengths=(8,), depths=(0.0, 2.0)), "depths of 0 to 1"),
        (lambda: NeedleRequest(repetitions=0), "--repetitions of 1 or more, got 0"),
        (lambda: prompt_chunks(100, 4), "a chunk of 5 tokens or more, got 4"),
        (lambda: evaluate([]), "rows of different names"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_answers_are_the_first_word_or_anywhere_in_a_text():
    word, text = NeedlePrompt("", "42", is_one_word=True), NeedlePrompt("", "1234567")
    assert word.is_found("42") and word.is_found(" 42 17") and not word.is_found("17 42")
    assert not word.is_found("") and not word.is_found("421")
    assert text.is_found(" 1,234,567.") and not text.is_found("123456")


@pytest.mark.parametrize("length", [3, 5, 63, 64, 65, 66, 130, 200])
def test_the_last_pass_over_a_prompt_is_whole(length):
    chunks = prompt_chunks(length, 64)
    assert [i for chunk in chunks for i in chunk] == list(range(length))
    assert len(chunks[-1]) >= min(length, 64)
    assert all(len(chunk) > 4 for chunk in chunks) or length <= 4


def test_one_record_for_each_row_and_cell():
    told = []
    rows = [row("bf16"), row("fp8", is_right=lambda number: number != 0)]
    records = evaluate(rows, records=Records(on_record=told.append))
    assert told == records and len(records) == 8
    cells = [(r.case["recipe"], r.case["length"], r.case["depth"]) for r in records[:3]]
    assert cells == [("bf16", 32, 0.0), ("bf16", 32, 1.0), ("bf16", 64, 0.0)]
    first, second = records[0], records[4]
    assert first.values == {
        "found_percent": 100,
        "num_found": 4,
        "found_standard_error_percent": 0,
        **{f"question_{number}_percent": 100 for number in range(1, 5)},
    }
    assert first.baseline is None and second.baseline == "bf16"
    assert second.values["found_percent"] == second.values["recovery_percent"] == 75
    assert second.values["found_standard_error_percent"] == pytest.approx(25)
    assert second.values["recovery_standard_error_percent"] == pytest.approx(25)


def test_nothing_is_recovered_of_nothing():
    rows = [row("bf16", is_right=lambda number: False), row("fp8")]
    records = evaluate(rows)
    assert "recovery_percent" not in records[-1].values


def test_done_cells_are_not_measured_again():
    calls, skipped = [], []
    rows = [row("bf16", calls=calls), row("fp8", calls=calls)]
    whole = evaluate(rows)
    assert len(calls) == 8
    done = whole[:3] + whole[5:6]
    again = evaluate(rows, records=Records(done), on_skip=skipped.append)
    assert len(calls) == 8 + 4
    assert skipped == [(32, 0.0), (32, 1.0), (64, 0.0), (32, 1.0)]
    assert [r.values for r in again] == [r.values for r in whole]
    # On another machine, and with another seed, it is another search.
    elsewhere = [replace(r, machine=replace(r.machine, gpu="another")) for r in whole]
    evaluate(rows, records=Records(elsewhere))
    assert len(calls) == 12 + 8
    other = Grid(lengths=GRID.lengths, depths=GRID.depths, repetitions=4, seed=1)
    evaluate(rows, other, records=Records(whole))
    assert len(calls) == 20 + 8
    # So are answers that another row's are compared with, by another recipe of the same name.
    evaluate(rows[::-1], records=Records(whole))
    assert len(calls) == 28 + 8
    changed = [rows[0], replace(rows[1], about={"model": "m", "recipe_digest": "0"})]
    evaluate(changed, records=Records(whole))
    assert len(calls) == 36 + 4


def test_a_text_that_changes_makes_another_haystack():
    first, second = (
        TextHaystack(count=count, filler=(f"{word} is here.",), name="a.txt").about
        for word in ("Hay", "Straw")
    )
    assert first["haystack"] == second["haystack"] == "a.txt"
    assert first["data_digest"] != second["data_digest"]
    assert TextHaystack(count=count).about == {"haystack": "text", "num_keys": 4}


def test_a_recipe_is_known_by_what_it_does(tmp_path):
    path, file = tmp_path / "recipe.toml", tmp_path / "scales.json"

    def digest(row, scale=0.1, **changes):
        request = NeedleRequest(recipe=(row,), **changes)
        calibration = calibration_of(request, GRID)
        scales = {PLAIN_KEYS: ScaleSet({"layers.0.self_attn": LayerScales(None, scale, scale)})}
        (found,) = participants(request, MODEL, scales, None, calibration=calibration)
        return found.about["recipe_digest"]

    # Calibrated: by the margin. Given: by the scales, whatever their file is called.
    assert digest("tensor") == digest("tensor") != digest("tensor", margin=2.0)
    assert digest("tensor") == digest("tensor", scale=1.0)
    assert digest("tensor", scales=file) != digest("tensor", scale=1.0, scales=file)
    found = []
    for settings in ({"scaling": "unit"}, {"granularity": "token"}):
        Recipe(kv_cache=settings).save(path)
        found.append(digest(str(path)))
    Recipe(kv_cache={"scaling": "static"}, scales=file).save(path)
    for scale in (0.1, 0.2):
        file.write_text(json.dumps({"a": {"q": scale, "k": scale, "v": scale}}))
        found.append(digest(str(path)))
    assert len(set(found)) == 4
    # Records of earlier runs are found by these letters.
    assert recipe_digest(Recipe(kv_cache={"scaling": "unit"})) == "a21fae62f2a7"
    written = {"tensor": "0544f35c668a", "head+skip=0": "99804dbf5e9c", "token": "0ba8178d53b5"}
    written["unit+rotate+promote=none"] = "588f6cc084ac"
    assert {row: digest(row) for row in written} == written


def test_rows_may_say_when_sums_are_promoted():
    names = ("baseline", "unit+promote=none", "unit+rotate+promote=4+skip=0", "unit")
    rows = [row for _, row in local_rows(NeedleRequest(recipe=names), MODEL, {})]
    assert [r.recipe().promote_every for r in rows[1:]] == [None, 4, 1]
    assert rows[2].recipe().skip_layers == ("0",) and rows[2].name == f"fp8 {names[2]}"


def test_the_error_of_a_recovery_is_that_of_a_quotient():
    first = {"found_percent": 80.0, "found_standard_error_percent": 4.0}
    own = {"found_percent": 40.0, "found_standard_error_percent": 3.0}
    found = recovery(own, first, "found")
    assert found["recovery_percent"] == 50
    # (40 ± 3) / (80 ± 4): 0.5 · √(0.075² + 0.05²).
    expected = 50 * (0.075**2 + 0.05**2) ** 0.5
    assert found["recovery_standard_error_percent"] == pytest.approx(expected)

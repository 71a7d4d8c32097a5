"""Questions of choice and math: the forms of public data sets, and generated ones."""

import csv
import json
from fractions import Fraction

import pytest

from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.measure.evaluate.math_judge import MathJudge
from octavo.measure.evaluate.task_data import (
    generated_choice_questions,
    generated_math_questions,
    last_boxed,
    load_choice_questions,
    load_math_questions,
    read_letter,
    visible,
)

GPQA = {
    "Pre-Revision Question": "old",
    "Question": "Which particle, then?\n",
    "Correct Answer": "the muon, of course",
    "Incorrect Answer 1": 'a "tau"',
    "Incorrect Answer 2": "an electron",
    "Incorrect Answer 3": "a proton\nor two",
    "Record ID": "rec1",
}
MMLU = {"question": "What?", "choices": ["a", "b", "c"], "answer": 1}
MATH = {
    "problem": "Convert.",
    "solution": r"So \boxed{1}.",
    "answer": r"\left( 3, \frac{\pi}{2} \right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return str(path)


def write_csv(path, *rows):
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_gpqa_of_a_csv_file(tmp_path):
    path = write_csv(tmp_path / "gpqa_diamond.csv", GPQA, {**GPQA, "Record ID": "rec2"})
    first, second = load_choice_questions(path)
    assert (first.name, second.name) == ("rec1", "rec2")
    assert first.text == "Which particle, then?" and first.answer == "the muon, of course"
    assert first.wrong == ('a "tau"', "an electron", "a proton\nor two")


def test_choices_as_a_list(tmp_path):
    rows = (MMLU, {**MMLU, "answer": "C"}, {"question": "?", "options": ["x", "y"], "answer": "0"})
    found = load_choice_questions(write_jsonl(tmp_path / "x.jsonl", *rows))
    assert [q.answer for q in found] == ["b", "c", "x"]
    assert found[0].wrong == ("a", "c") and [q.name for q in found] == ["1", "2", "3"]


def test_math_and_aime(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (math,) = load_math_questions(write_jsonl(tmp_path / "math.jsonl", MATH))
    assert math.answer == MATH["answer"] and math.name == MATH["unique_id"]
    assert math.item(0).messages[0]["content"].startswith("Convert.\n")
    aime = [{"ID": "2024-I-1", "Problem": "Find it.", "Solution": "Long.", "Answer": 73.0}]
    parquet.write_table(pyarrow.Table.from_pylist(aime), tmp_path / "aime.parquet")
    (found,) = load_math_questions(str(tmp_path / "aime.parquet"))
    assert (found.name, found.text, found.answer) == ("2024-I-1", "Find it.", "73")
    path = write_csv(tmp_path / "aime.csv", {"Question": "Find.", "Answer": "073"})
    assert load_math_questions(path)[0].answer == "073"
    boxed = {"problem": "p", "solution": r"As \boxed{\frac{1}{2}} is."}
    path = write_jsonl(tmp_path / "hendrycks.jsonl", boxed)
    assert load_math_questions(path)[0].answer == r"\frac{1}{2}"
    both = tmp_path / "both"
    both.mkdir()
    write_jsonl(both / "a.jsonl", MATH)
    write_jsonl(both / "b.jsonl", MATH)
    assert [q.name for q in load_math_questions(str(both))] == ["1", "2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"x": 1}, "x.jsonl:1: expected the columns of GPQA"),
        ({**GPQA, "Incorrect Answer 2": None}, "expected texts in Question"),
        ({**GPQA, "Question": " "}, "with words in them"),
        ({**MMLU, "answer": 3}, "one of 3 choices, got 3"),
        ({**MMLU, "answer": "D"}, "one of 3 choices, got 'D'"),
        ({**MMLU, "answer": True}, "one of 3 choices, got True"),
        ({**MMLU, "choices": ["a", 2], "answer": 0}, "expected texts in choices"),
        ({**MMLU, "choices": ["a"], "answer": 0}, "expected 2 to 26 options"),
    ],
)
def test_damaged_choices_are_named(tmp_path, row, message):
    with pytest.raises(CheckpointError, match=message):
        load_choice_questions(write_jsonl(tmp_path / "x.jsonl", row))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "p"}, "x.jsonl:1: expected problem or question"),
        ({"problem": "p", "solution": "none"}, "expected problem or question"),
        ({"problem": "  ", "answer": "1"}, "with words in them"),
        ({"problem": 3, "answer": "1"}, "expected problem or question"),
    ],
)
def test_damaged_problems_are_named(tmp_path, row, message):
    with pytest.raises(CheckpointError, match=message):
        load_math_questions(write_jsonl(tmp_path / "x.jsonl", row))


def test_files_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match="files in .*, got none"):
        load_math_questions(str(tmp_path))
    (tmp_path / "x.txt").touch()
    with pytest.raises(ConfigError, match="a file of .csv"):
        load_math_questions(str(tmp_path / "x.txt"))
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(CheckpointError, match="expected questions in"):
        load_math_questions(str(tmp_path / "x.jsonl"))
    (tmp_path / "x.jsonl").write_text("[1]\n")
    with pytest.raises(CheckpointError, match="x.jsonl:1: expected an object"):
        load_choice_questions(str(tmp_path / "x.jsonl"))
    (tmp_path / "x.csv").write_text("Question,Answer\nonly one cell\n")
    with pytest.raises(CheckpointError, match="row 1: expected a cell for each column"):
        load_math_questions(str(tmp_path / "x.csv"))
    with pytest.raises(ConfigError, match="--subset and --split are for"):
        load_math_questions(str(tmp_path / "x.csv"), subset="a")


def test_a_data_set_of_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name, subset, streaming):
        asked.append((name, subset, streaming))
        return {"train": [GPQA]} if subset else {"train": [], "test": [MMLU], "dev": []}

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_choice_questions("Idavidrein/gpqa", "gpqa_diamond")[0].name == "rec1"
    assert load_choice_questions("cais/mmlu")[0].answer == "b"
    assert asked[0] == ("Idavidrein/gpqa", "gpqa_diamond", True)
    with pytest.raises(ConfigError, match="--split, one of 'train', got 'dev'"):
        load_choice_questions("Idavidrein/gpqa", "gpqa_diamond", "dev")

    def fail(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UnsupportedError, match="no network"):
        load_math_questions("HuggingFaceH4/MATH-500")


def test_options_are_shuffled_by_seed_and_repetition():
    question = generated_choice_questions(1)[0]
    asked = [question.item(repetition, 0) for repetition in range(40)]
    assert asked[0].messages == question.item(0, 0).messages
    assert {one.answer for one in asked} == set("ABCD")
    assert len({one.messages[0]["content"] for one in asked}) > 10
    for one in asked:
        text = one.messages[0]["content"]
        assert f"\n{one.answer}) {question.answer}\n" in text and "'Answer: X'" in text
        assert one.letters == "ABCD"


def test_generated_choices_say_their_answer():
    questions = generated_choice_questions(30)
    assert questions == generated_choice_questions(30) != generated_choice_questions(30, seed=1)
    for question in questions:
        asked = question.text.split("Who is the ")[1].split(" of ")[0]
        assert f"{question.answer} is the {asked}." in question.text
        assert len({question.answer, *question.wrong}) == 4


def test_generated_problems_have_right_answers():
    questions = generated_math_questions(40)
    assert questions == generated_math_questions(40) != generated_math_questions(40, seed=1)
    pytest.importorskip("math_verify")
    judge, kinds = MathJudge(), set()
    for question in questions:
        text = question.text
        if "remainder" in text:
            a, b = (int(word) for word in text.rstrip("?").split() if word.isdigit())
            true, kind = Fraction(a % b), "remainder"
        elif " of " in text:
            percent, whole = text.removeprefix("What is ").rstrip("?").split("\\% of ")
            true, kind = Fraction(int(percent) * int(whole), 100), "share"
        else:
            inside, kind = text.split("$")[1], text.split("$")[1].split()[1][:5]
            assert judge.judge(f"\\boxed{{{inside}}}", question.answer)[1]
            kinds.add(kind + ("f" if "frac" in inside else ""))
            continue
        kinds.add(kind)
        assert judge.judge(f"\\boxed{{{true}}}", question.answer)[1]
    judge.close()
    assert len(kinds) == 5


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"),
        ("So it is B.\nANSWER : B", "B"),
        ("**Answer:** (C)", "C"),
        ("**Answer: D**", "D"),
        ("Answer: **A**", "A"),
        ("Answer: $C$", "C"),
        (r"Answer: $\boxed{\text{C}}$", "C"),
        (r"Answer: \boxed{B) the nucleus}", "B"),
        ("answer: d", "D"),
        ("Answer: A\nNo, wait.\nAnswer: B", "B"),
        ("Answer: A) because a cat is a cat", "A"),
        (r"Thus \boxed{D}.", "D"),
        (r"Thus $\boxed{\textbf{(A)}\ 12}$.", "A"),
        ("\\boxed{A} but then\nAnswer: C", "C"),
        ("<think>Answer: A</think>Answer: B", "B"),
        ("Answer: A, I thought.</think>\n\nAnswer: D", "D"),
    ],
)
def test_letters(text, letter):
    assert read_letter(text, "ABCD") == letter


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The correct option is C",
        "Answer: Carbon",
        "Answer: a good question",
        "Answer: A1",
        "Answer: E",
        r"\boxed{12}",
        r"\boxed{Carbon}",
        "Answer:\nnone",
        "<think>Answer: A",
        "Answer: A</think> I do not know",
    ],
)
def test_no_letter(text):
    assert read_letter(text, "ABCD") is None


def test_letters_are_those_of_the_options():
    assert read_letter("Answer: E", "ABCDE") == "E"
    assert read_letter("Answer: C", "AB") is None


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}} and more", r"\frac{1}{\sqrt{2}}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed { x }", "x"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{\text{a } b}", r"\text{a } b"),
    ],
)
def test_boxes(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize("text", ["", "42", r"\boxed{", r"\boxed{}", r"\boxedx{3}", r"\boxed{{1}"])
def test_no_box(text):
    assert last_boxed(text) is None


def test_thoughts_are_not_shown():
    assert visible("a") == "a"
    assert visible("<think>a</think>b</think>c") == "c"
    assert visible("<think>a") is None

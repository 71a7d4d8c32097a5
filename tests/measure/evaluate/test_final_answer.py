"""The final answer in a text: letters and boxes."""

import pytest

from octavo.measure.evaluate.task_data import last_boxed, read_letter, read_math, visible


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


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"It is \boxed{12}. Answer: 13", "12"),
        ("The final answer is 12. I have checked it.", "12"),
        ("The answer is: $3.5$", "$3.5$"),
        ("**Answer:** 073", "073"),
        ("answer: 4\nanswer: 5", "5"),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
    ],
)
def test_math(text, answer):
    assert read_math(text) == answer


@pytest.mark.parametrize("text", ["", "12", "It answers nothing", r"<think>\boxed{1}", "Answer: "])
def test_no_math(text):
    assert read_math(text) is None


def test_thoughts_are_not_shown():
    assert visible("a") == "a"
    assert visible("<think>a</think>b</think>c") == "c"
    assert visible("<think>a") is None

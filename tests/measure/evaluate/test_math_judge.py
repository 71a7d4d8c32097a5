"""Answers of mathematics by math-verify: which are the same, and what hostile ones may cost."""

import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("math_verify")

from octavo.errors import UnsupportedError
from octavo.measure.evaluate import math_judge, math_worker
from octavo.measure.evaluate.math_judge import MathJudge

SAME = [
    ("42", "42"),
    ("073", "73"),
    ("1,234", "1234"),
    (r"1{,}234", "1234"),
    (r"10,\!000", "10000"),
    ("-1,234.50", "-1234.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac12", r"\tfrac{1}{2}"),
    ("1/2", r"\frac12"),
    (".5", "0.50"),
    ("-.25", r"-\frac{1}{4}"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90°"),
    (r"5\text{ cm}", "5"),
    (r"18 \text{ square units}", "18"),
    (r"50\%", "50"),
    (r"\$5.00", "5"),
    ("x=5", "5"),
    (r"f(x) = 2x+1", "1+2x"),
    (r"x \in [1,2]", "[1,2]"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "(C)"),
    ("12.", "12"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    ("1,-2", "-2, 1"),
    (r"1 \text{ and } -2", "1,-2"),
    (r"1\pm\sqrt{2}", r"1-\sqrt{2},1+\sqrt2"),
    (r"\{1,2\}", r"\left\{2,1\right\}"),
    (r"[0,1)\cup(2,3)", r"(2,3) \cup [0,1)"),
    (r"\begin{pmatrix} 1 \\ 1/2 \end{pmatrix}", r"\begin{pmatrix}1\\0.5\end{pmatrix}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{x}{2}", "0.5x"),
    ("x^2+y^2=1", "1=x^2+y^2"),
    (r"3\frac12", "3.5"),
    (r"\log_2 8", "3"),
    ("2^{10}", "1024"),
    (r"2\cdot3^4", "162"),
    ("5!", r"12 \times \binom{5}{2}"),
    ("3+4i", "4i+3"),
    (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}"),
    ("1011_{2}", "1011_2"),
    ("|-3|", "3"),
    (r"\sin(\frac{\pi}{6})", "1/2"),
]
DIFFERENT = [
    ("42", "43"),
    ("-5", "5"),
    ("", "5"),
    ("1,234", "1,235"),
    ("1,2", "1,2,3"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    ("1 1/2", "11/2"),
    ("0.333", r"\frac13"),
    ("3.14", r"\pi"),
    ("2x", "x"),
    ("x", "y"),
    ("A", "B"),
    (r"\pm 3", "3"),
    (r"[0,1)\cup(2,3)", "[0,1)"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("1000000000000000000001", "1000000000000000000000"),
    (r"\sqrt{-1}", "1"),
    ("1/0", "2/0"),
    ("__import__('os')", "1"),
]
# What our own rules told apart before math-verify took their place, and it does not; and the other
# way round. A change of either is news for the page of evaluations.
KNOWN_TO_BE_THE_SAME = [("1,1,2", "1,2,2"), ("even", "neve"), ("1011_2", "1011")]
KNOWN_TO_DIFFER = [
    ("10 000", "10000"),
    (r"12\text{ cm}^2", "12 cm^2"),
    (r"\$5.00", "5 dollars"),
    (r"\sqrt[3]{-8}", "-2"),
    ("3 1/2", "7/2"),
    ("x = 1,234", "1234"),
]


@pytest.fixture(scope="module")
def judge():
    own = MathJudge()
    yield own
    own.close()


def is_right(judge, found, true):
    return judge.judge(f"So it is $\\boxed{{{found}}}$.", true)[1]


@pytest.mark.parametrize(("a", "b"), SAME + KNOWN_TO_BE_THE_SAME)
def test_the_same(judge, a, b):
    assert is_right(judge, a, b) and is_right(judge, b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT + KNOWN_TO_DIFFER)
def test_different(judge, a, b):
    assert not is_right(judge, a, b)
    if a:  # a data set has no empty answers
        assert not is_right(judge, b, a)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"It is \boxed{12}. Answer: 13", "12"),
        ("The final answer is 12. I have checked it.", "12"),
        ("The answer is: $3.5$", "3.5"),
        ("**Answer:** 073", "73"),
        ("answer: 4\nanswer: 5", "5"),
        (r"roots are \boxed{1} and \boxed{-2}.", "1,-2"),
        (r"\boxed{3} and \boxed{4", "3"),
        ("The answer is\n\n" + "word " * 50_000 + r"\boxed{7}", "7"),
    ],
)
def test_what_a_text_ends_up_with(judge, text, answer):
    assert judge.judge(text, answer) == (answer, True)


@pytest.mark.parametrize("text", ["", "It answers nothing", "Answer: ", r"\boxed{", r"\boxed{}"])
def test_no_answer(judge, text):
    assert judge.judge(text, "1") == (None, False)


def test_no_text_is_run_as_code(judge, tmp_path):
    victim = tmp_path / "victim"
    for text in (f"\\boxed{{open('{victim}', 'w')}}", f"The answer is open('{victim}', 'w')"):
        assert not judge.judge(text, "1")[1]
    assert not victim.exists()


SLOW = [
    *("9**9**9**9", "1000000!", "{" * 5000, "1+" * 20_000 + "1", "1" * 100_000),
    r"\frac{" * 500 + "1" + "}{2}" * 500,
]


@pytest.mark.parametrize(
    "text",
    ["9^{9^{9^{9}}}", "(" * 300, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)],
    ids=lambda text: text[:12],
)
def test_a_hostile_answer_takes_limited_time(text):
    own = MathJudge(limit_s=1.0)
    try:
        begun = time.monotonic()
        assert not own.judge(f"\\boxed{{{text}}}", "1")[1]
        assert time.monotonic() - begun < 10
        own._limit_s = 30.0
        assert own.judge(r"\boxed{1}", "1") == ("1", True)  # it goes on with the next answer
    finally:
        own.close()


def test_judges_work_in_threads(judge):
    found = {}

    def ask(number):
        found[number] = judge.judge(f"\\boxed{{{number}}}", "3")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: (str(number), number == 3) for number in range(6)}


def test_a_library_that_does_not_start_is_explained(monkeypatch, tmp_path):
    broken = tmp_path / "worker.py"
    broken.write_text("print('[\"ImportError: no antlr4\", false]')\n")
    monkeypatch.setattr(math_judge.math_worker, "__file__", str(broken))
    with pytest.raises(UnsupportedError, match=r"got ImportError: no antlr4: .*\[math\]'"):
        MathJudge().judge("1", "1")
    broken.write_text("")
    with pytest.raises(UnsupportedError, match="got no answer"):
        MathJudge().judge("1", "1")


def test_the_worker_needs_nothing_but_math_verify():
    code = (
        "import io, runpy, sys; sys.stdin = io.StringIO();"
        f"runpy.run_path({math_worker.__file__!r}, run_name='__main__');"
        "assert not {'torch', 'octavo'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[null, true]\n"


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UnsupportedError, match=r"needs math_verify, .*\[math\]'"):
        MathJudge()

"""Answers of mathematics: which spellings are the same, which are not."""

import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError, UnsupportedError
from octavo.measure.evaluate import math_equality
from octavo.measure.evaluate.math_equality import (
    NotAnExpression,
    is_equal,
    make_checker,
    normalize,
    value_of,
)

SAME = [
    ("42", "42"),
    ("073", "73"),
    ("1,234", "1234"),
    (r"1{,}234", "1234"),
    (r"10,\!000", "10000"),
    ("10 000", "10000"),
    ("-1,234.50", "-1234.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac12", r"\tfrac{1}{2}"),
    ("1/2", r"\frac12"),
    (".5", "0.50"),
    ("-.25", r"-\frac{1}{4}"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90°"),
    (r"5\text{ cm}", "5"),
    ("5 cm", "5"),
    (r"18 \text{ square units}", "18"),
    (r"12\text{ cm}^2", "12 cm^2"),
    (r"50\%", "50"),
    (r"\$5.00", "5 dollars"),
    ("x=5", "5"),
    (r"f(x) = 2x+1", "1+2x"),
    (r"x \in [1,2]", "[1,2]"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "(C)"),
    ("$12$", r"\(12\)"),
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
    (r"\sqrt[3]{-8}", "-2"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{x}{2}", "0.5x"),
    ("x^2+y^2=1", "1=x^2+y^2"),
    (r"3\frac12", "3.5"),
    ("3 1/2", "7/2"),
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
    ("1,1,2", "1,2,2"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    ("1 1/2", "11/2"),
    ("even", "neve"),
    ("0.333", r"\frac13"),
    ("3.14", r"\pi"),
    ("2x", "x"),
    ("x", "y"),
    ("A", "B"),
    (r"\pm 3", "3"),
    (r"[0,1)\cup(2,3)", "[0,1)"),
    ("1011_2", "1011"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("1000000000000000000001", "1000000000000000000000"),
    (r"\sqrt{-1}", "1"),
    ("1/0", "2/0"),
    ("9^{9^{9^{9}}}", "1"),
    ("100000!", "1"),
    ("(" * 300, "1"),
    ("1" * 1200, "1" * 1201),
    ("__import__('os')", "1"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_the_same(a, b):
    assert is_equal(a, b) and is_equal(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different(a, b):
    assert not is_equal(a, b) and not is_equal(b, a)


@pytest.mark.parametrize("text", [text for pair in SAME for text in pair])
def test_normal_is_normal(text):
    assert normalize(normalize(text)) == normalize(text)


@settings(max_examples=60, deadline=None)
@given(st.text("0123456789+-*/^!()[]{}|\\,. xyeifracsqtpmu_$%=&", max_size=40), st.text(max_size=9))
def test_no_text_breaks_the_comparison(a, b):
    assert isinstance(is_equal(a, b), bool)
    assert is_equal(a, a)


@settings(max_examples=40, deadline=None)
@given(st.integers(-999, 999), st.integers(1, 99), st.integers(-50, 50))
def test_expressions_have_the_value_of_python(a, b, c):
    text = f"{a} + \\frac{{{c}}}{{{b}}} - ({c})^2*{b}/{b}"
    assert is_equal(text, f"({a * b + c - c * c * b})/{b}")
    assert not is_equal(text, f"({a * b + c - c * c * b + 1})/{b}")


def test_what_is_no_expression_is_said():
    for text in ("", "2 3", "word", "1+", "(1", "x_1", "\\unknown", "sin^2 x", "1)"):
        with pytest.raises(NotAnExpression):
            value_of(text, lambda name: 1j)
    with pytest.raises(NotAnExpression):
        value_of("1/x", lambda name: 0j)


def test_the_checker_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert make_checker().name == make_checker("octavo").name == "octavo"
    with pytest.raises(UnsupportedError, match=r"needs math_verify, .*\[math\]'"):
        make_checker("math_verify")
    with pytest.raises(ConfigError, match="auto, octavo or math_verify"):
        make_checker("sympy")


def test_math_verify_is_asked_about_what_is_different(monkeypatch):
    asked = []

    def verify(true, found):
        asked.append((true, found))
        return found == "$x>3$"

    package = types.SimpleNamespace(__spec__="here", parse=str, verify=verify)
    monkeypatch.setitem(sys.modules, "math_verify", package)
    monkeypatch.setattr(math_equality.importlib.metadata, "version", lambda name: "0.9.0")
    checker = make_checker()
    assert checker.name == "octavo, math_verify 0.9.0"
    assert checker.is_equal("1/2", "0.5") and asked == []
    assert checker.is_equal("x>3", r"(3,\infty)") and not checker.is_equal("4", "5")
    assert asked == [(r"$(3,\infty)$", "$x>3$"), ("$5$", "$4$")]

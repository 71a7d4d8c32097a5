r"""Whether two answers of a problem are the same.

octavo's own rules compare normalized texts, then numbers exactly, expressions at points, and lists,
sets, tuples, intervals and matrices part by part. The package math_verify, where it is installed,
is asked about what they find different. sympy is not: it reads a text by evaluating it as code.
"""

import cmath
import importlib.metadata
import importlib.util
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from octavo.errors import ConfigError
from octavo.extras import need
from octavo.measure.evaluate.math_expression import Expression, NotAnExpression, Value

OWN, MATH_VERIFY, AUTO = "octavo", "math_verify", "auto"
NUM_POINTS = 4
MAX_CHARACTERS = 1000
_BRACKETS = {"(": ")", "[": "]", "\\{": "\\}"}
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)

_WORDS = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|mathsf|operatorname)\s*"
_TEXT = re.compile(_WORDS + r"\{([^{}]*)\}")
_AND = re.compile(_WORDS + r"\{\s*,?\s*(?:and|or)\s*\}|(?<=[\s\d}$])(?:and|or)(?=[\s$\\-])")
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d))?"
# 5 \text{ cm}^2, \frac{1}{2} \mathrm{m/s}
_UNIT_AS_TEXT = re.compile(rf"(?<=[\w}})!])\s*(?:{_TEXT.pattern}{_POWER}[\s.]*)+$")
# 5 square inches, 12 cm^2; one letter may be a variable
_UNIT_AS_WORDS = re.compile(rf"(?<=[\d}})])\s+[A-Za-z]{{2,}}(?:[ /-][A-Za-z]+)*\.?{_POWER}$")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\s?\d{3})+(?:\.\d+)?|[-+]?\d{1,3}(?: \d{3})+")
_VARIABLE = re.compile(r"\s*[A-Za-z](?:\([A-Za-z]\)|_\{?\w\}?)?\s*(?:=|\\in(?![A-Za-z]))\s*([^=]+)")
_REPLACED = (
    (r"(?<!\\)\\[()\[\]$]|\$", ""),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![A-Za-z])\.?", ""),
    (r"\\!", ""),
    (r"\{,\}", ","),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z])|°", ""),
    (r"\\?%", ""),
    (r"\\(?:leq|leqslant)(?![A-Za-z])|≤", r"\\le"),
    (r"\\(?:geq|geqslant)(?![A-Za-z])|≥", r"\\ge"),
    (r"\\(?:cdot|times|ast)(?![A-Za-z])|×|·", "*"),
    (r"\\(?:div)(?![A-Za-z])|÷", "/"),
    (r"−|–", "-"),
    (r"π", r"\\pi"),
    (r"∞", r"\\infty"),
    (r"√", r"\\sqrt"),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"_\{(\w)\}", r"_\1"),
)


@dataclass(frozen=True)
class Checker:
    """A rule that tells whether a found answer is the true one, and its name for records."""

    name: str
    is_equal: Callable[[str, str], bool]


def make_checker(name: str = AUTO) -> Checker:
    """octavo's own rules, "math_verify" after them, or "auto": that if it is installed."""
    if name not in (AUTO, OWN, MATH_VERIFY):
        raise ConfigError(f"expected --checker {AUTO}, {OWN} or {MATH_VERIFY}, got {name!r}")
    if name == OWN or (name == AUTO and importlib.util.find_spec("math_verify") is None):
        return Checker(OWN, is_equal)
    need("--checker math_verify", "math_verify")
    version = importlib.metadata.version("math-verify")
    return Checker(
        f"{OWN}, {MATH_VERIFY} {version}",
        lambda found, true: is_equal(found, true) or _is_verified(found, true),
    )


def is_equal(found: str, true: str) -> bool:
    """By octavo's own rules."""
    if max(len(found), len(true)) > MAX_CHARACTERS:  # no answer but a text that was boxed
        return found.strip() == true.strip()
    return _is_same(normalize(found), normalize(true))


def _is_verified(found: str, true: str) -> bool:
    from math_verify import parse, verify  # type: ignore[import-not-found]

    return bool(verify(parse(f"${true}$"), parse(f"${found}$")))


def _is_same(a: str, b: str, depth: int = 0) -> bool:
    if a.casefold() == b.casefold():
        return True
    if depth > 3:
        return False
    if "\\pm" in a or "\\pm" in b:
        return _is_any_order(_both_signs(a), _both_signs(b), depth)
    for separator in (",", "\\cup"):
        parts, others = _split(a, separator), _split(b, separator)
        if len(parts) > 1 or len(others) > 1:
            return _is_any_order(parts, others, depth)
    matrices = _matrix(a), _matrix(b)
    if matrices != (None, None):
        return _is_each(*matrices, depth)
    group, other_group = _group(a), _group(b)
    if group is not None and other_group is not None:
        (kind, inside), (other_kind, other) = group, other_group
        # (3) is 3 in brackets, (3, 4) a point or an interval.
        if len(inside) > 1 or len(other) > 1 or "\\{" in kind + other_kind:
            is_set = kind == other_kind == "\\{\\}"
            check = _is_any_order if is_set else _is_each
            return kind == other_kind and check(inside, other, depth)
    if a.count("=") == b.count("=") == 1:
        sides = a.split("="), b.split("=")
        return _is_any_order(*sides, depth)
    return _is_same_value(a, b)


def _both_signs(text: str) -> list[str]:
    if "\\pm" not in text:
        return _split(text, ",")
    return [re.sub(r"\\pm(?![A-Za-z])", sign, text) for sign in "+-"]


def _is_each(a: Sequence[str] | None, b: Sequence[str] | None, depth: int) -> bool:
    if a is None or b is None or len(a) != len(b):
        return False
    return all(_is_same(one, other, depth + 1) for one, other in zip(a, b, strict=True))


def _is_any_order(a: Sequence[str], b: Sequence[str], depth: int) -> bool:
    left = list(b)
    if len(a) != len(b):
        return False
    for one in a:
        place = next((i for i, other in enumerate(left) if _is_same(one, other, depth + 1)), None)
        if place is None:
            return False
        del left[place]
    return True


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that are in no brackets."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        if depth == 0 and text.startswith(separator, place):
            parts.append(text[start:place])
            start = place = place + len(separator)
            continue
        depth += (text[place] in "([{") - (text[place] in ")]}")
        place += 1
    return [part.strip() for part in [*parts, text[start:]]]


def _group(text: str) -> tuple[str, list[str]] | None:
    """The brackets around a whole text, and the parts in them."""
    opening = next((one for one in _BRACKETS if text.startswith(one)), None)
    closing = next((one for one in (")", "]", "\\}") if text.endswith(one)), None)
    if opening is None or closing is None:
        return None
    inside = text[len(opening) : len(text) - len(closing)]
    depth = 0
    for letter in inside:  # (1,2) is one group, (1)(2) is not
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return None
    return opening + closing, _split(inside, ",")


def _matrix(text: str) -> list[str] | None:
    found = _MATRIX.fullmatch(text)
    if found is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", found[2]) if row.strip()]
    return [f"{len(rows)}", *(cell.strip() for row in rows for cell in row)]


def _is_same_value(a: str, b: str) -> bool:
    try:
        one, other = Expression(a), Expression(b)
    except NotAnExpression:
        return False
    names = sorted(one.variables | other.variables)
    draw = random.Random("points")
    for _ in range(NUM_POINTS if names else 1):
        # Complex points: roots and logarithms of negative numbers have values, too.
        point: dict[str, Value] = {
            name: Fraction(draw.randint(101, 299), 100) if draw.random() < 0.5
            else complex(draw.uniform(1, 3), draw.uniform(-1, 1))
            for name in names
        }  # fmt: skip
        try:
            values = one.value(point), other.value(point)
        except NotAnExpression:
            return False
        if isinstance(values[0], Fraction) and isinstance(values[1], Fraction):
            if values[0] != values[1]:
                return False
        elif not cmath.isclose(*map(complex, values), rel_tol=1e-9, abs_tol=1e-12):
            return False
    return True


def normalize(answer: str) -> str:
    """The answer without what does not matter; `normalize` of it is itself."""
    text = answer.strip()
    # Rules uncover each other: a unit may stand inside of delimiters, a number behind "x =".
    for _ in range(4):
        before, text = text, _once(text)
        if text == before:
            break
    return text


def _once(text: str) -> str:
    for pattern, replacement in _REPLACED:
        text = re.sub(pattern, replacement, text)
    text = _AND.sub(",", text).strip().rstrip(".,;").strip()
    text = re.sub(r",(\s*,)+", ",", text)
    whole = _TEXT.fullmatch(text)
    text = whole[1] if whole else _UNIT_AS_TEXT.sub("", text)
    text = _TEXT.sub(r"\1", _UNIT_AS_WORDS.sub("", text)).strip()
    if variable := _VARIABLE.fullmatch(text):
        text = variable[1].strip()
    if _THOUSANDS.fullmatch(text):
        text = re.sub(r"[,\s]", "", text)
    if text.startswith("{") and _is_one_group(text):
        text = text[1:-1]
    # Between two digits a space is no decoration: 1 1/2.
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", _kept_space, text.strip())


def _kept_space(match: re.Match[str]) -> str:
    """Spaces go, unless two words or a command and a letter would become one."""
    text, start, end = match.string, match.start(), match.end()
    is_inside = start > 0 and end < len(text)
    return " " if is_inside and text[start - 1].isalpha() and text[end].isalpha() else ""


def _is_one_group(text: str) -> bool:
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return place == len(text) - 1
    return False

r"""Whether two answers of a problem are the same.

octavo's own rules compare normalized texts, then numbers exactly, expressions at points, and lists,
sets, tuples, intervals and matrices part by part. The package math_verify, where it is installed,
is asked about what they find different. sympy is not: it reads a text by evaluating it as code.
"""

import cmath
import importlib.metadata
import importlib.util
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate

from octavo.errors import ConfigError
from octavo.extras import need
from octavo.measure.evaluate.task_data import braced

OWN, MATH_VERIFY, AUTO = "octavo", "math_verify", "auto"
NUM_POINTS, MAX_CHARACTERS = 4, 1000
MAX_EXPRESSION, MAX_DEPTH, MAX_POWER, MAX_BITS = 400, 40, 1000, 20_000
Value = Fraction | complex
_GROUP = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", re.DOTALL)
_ANY_ORDER = (",", "\\cup", "\\{\\}", "=")
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
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\\.|[A-Za-z]+|.)")
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    **{name: getattr(cmath, name) for name in ("sin", "cos", "tan", "exp")},
    **{f"arc{name}": getattr(cmath, f"a{name}") for name in ("sin", "cos", "tan")},
    "ln": cmath.log,
}
_CONSTANTS: dict[str, complex] = {"pi": cmath.pi + 0j, "e": cmath.e + 0j, "i": 1j}
_GREEK = {"alpha", "beta", "gamma", "theta", "lambda", "mu", "phi", "omega"}


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
    from math_verify import parse, verify  # type: ignore[import-not-found]

    def is_verified(found: str, true: str) -> bool:
        return is_equal(found, true) or bool(verify(parse(f"${true}$"), parse(f"${found}$")))

    return Checker(f"{OWN}, {MATH_VERIFY} {importlib.metadata.version('math-verify')}", is_verified)


def is_equal(found: str, true: str) -> bool:
    """By octavo's own rules."""
    if max(len(found), len(true)) > MAX_CHARACTERS:  # no answer but a text that was boxed
        return found.strip() == true.strip()
    return _is_same(normalize(found), normalize(true))


def _is_same(a: str, b: str, depth: int = 0) -> bool:
    if a.casefold() == b.casefold():
        return True
    (kind, parts), (other_kind, others) = _structure(a), _structure(b)
    if depth > 3 or kind != other_kind or len(parts) != len(others):
        return False
    if not kind:
        return _is_same_value(a, b)
    for one in parts:
        candidates = others if kind in _ANY_ORDER else others[:1]
        same = next((other for other in candidates if _is_same(one, other, depth + 1)), None)
        if same is None:
            return False
        others.remove(same)
    return True


def _structure(text: str) -> tuple[str, list[str]]:
    """What kind of list, set, matrix or equation a text is, and its parts; "" if it is none."""
    if "\\pm" in text:
        return ",", [re.sub(r"\\pm(?![A-Za-z])", sign, text) for sign in "+-"]
    for separator in (",", "\\cup"):
        if len(parts := _split(text, separator)) > 1:
            return separator, parts
    if found := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in found[2].split("\\\\") if row.strip()]
        return f"matrix of {len(rows)} rows", [cell.strip() for row in rows for cell in row]
    if found := _GROUP.fullmatch(text):
        opening, inside, closing = found.groups()
        depths = accumulate((letter in "([{") - (letter in ")]}") for letter in inside)
        # (1,2) is one group, (1)(2) is not; (3) is 3 in brackets, (3,4) a point or an interval.
        parts = _split(inside, ",") if min(depths, default=0) >= 0 else []
        if len(parts) > 1 or (parts and "\\" in opening + closing):
            return opening + closing, parts
    return ("=", text.split("=")) if text.count("=") == 1 else ("", [])


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that are in no brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if depth == 0 and text.startswith(separator, place):
            parts.append(text[start:place])
            start = place + len(separator)
        depth += (letter in "([{") - (letter in ")]}")
    return [part.strip() for part in [*parts, text[start:]]]


def _is_same_value(a: str, b: str) -> bool:
    """Whether two expressions have the same value, at several points where they have variables."""
    for number in range(NUM_POINTS):
        try:
            one, other = (value_of(text, partial(_coordinate, number)) for text in (a, b))
        except NotAnExpression:
            return False
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            if one != other:
                return False
        elif not cmath.isclose(complex(one), complex(other), rel_tol=1e-9, abs_tol=1e-12):
            return False
    return True


def _coordinate(number: int, name: str) -> Value:
    """The value of a variable at a point. Half are complex: negative numbers have roots, too."""
    draw = random.Random(f"{number}, {name}")
    if draw.random() < 0.5:
        return Fraction(draw.randint(101, 299), 100)
    return complex(draw.uniform(1, 3), draw.uniform(-1, 1))


def normalize(answer: str) -> str:
    """The answer without what does not matter; `normalize` of it is itself."""
    text, before = answer.strip(), None
    # Rules uncover each other: a unit may stand inside of delimiters, a number behind "x =".
    for _ in range(4):
        if text == before:
            break
        before = text
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
        if text.startswith("{") and braced(text, 0) == text[1:-1]:
            text = text[1:-1]
        # Between two digits a space is no decoration: 1 1/2.
        text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", _kept_space, text.strip())
    return text


def _kept_space(match: re.Match[str]) -> str:
    """Spaces go, unless two words or a command and a letter would become one."""
    text, start, end = match.string, match.start(), match.end()
    is_inside = start > 0 and end < len(text)
    return " " if is_inside and text[start - 1].isalpha() and text[end].isalpha() else ""


class NotAnExpression(ValueError):
    """A text that is no expression, or has no value."""


def value_of(text: str, variable: Callable[[str], Value]) -> Value:
    r"""The value of an expression in LaTeX or plain text, without evaluating it as code.

    Numbers are exact fractions as long as nothing irrational comes in, complex numbers after that.
    NotAnExpression refuses what is too large or too deep: a model may write anything. variable: the
    value of a variable by its name.
    """
    if len(text) > MAX_EXPRESSION:
        raise NotAnExpression("too long")
    # 3\frac{1}{2} and 3 1/2 are sums.
    text = re.sub(r"(?<![\w.}])(\d+)\s*(\\frac\{\d+\}\{\d+\}|\\frac\d\d)", r"(\1+\2)", text)
    text = re.sub(r"(?<![\w.}])(\d+)\s+(\d+)/(\d+)", r"(\1+\2/\3)", text)
    try:
        found = _Evaluation(_tokens(text), variable).whole()
    except (ArithmeticError, ValueError) as error:
        raise NotAnExpression(str(error)) from None
    if isinstance(found, complex) and not cmath.isfinite(found):
        raise NotAnExpression("not finite")
    return found


class _Evaluation:
    """Reads tokens from left to right, and computes as it goes."""

    def __init__(self, tokens: list[str], variable: Callable[[str], Value]) -> None:
        self._left, self._variable, self._depth = ["", *reversed(tokens)], variable, 0

    def whole(self) -> Value:
        """The value of all tokens."""
        found = self._sum()
        self._take("")
        return found

    def _next(self) -> str:
        return self._left[-1]

    def _take(self, expected: str) -> None:
        if not self._skip(expected):
            raise NotAnExpression(f"expected {expected or 'an end'}, got {self._next()!r}")

    def _skip(self, token: str) -> bool:
        """Whether this token came next, which is then behind us."""
        is_next = self._next() == token
        if is_next:
            self._left.pop()
        return is_next

    def _sign(self) -> int:
        """1 or -1, by the sign that comes next, if one does."""
        if self._skip("-"):
            return -1
        self._skip("+")
        return 1

    def _sum(self) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnExpression("too deep")
        found = self._product()
        while self._next() in ("+", "-"):
            found += self._sign() * self._product()
        self._depth -= 1
        return found

    def _product(self) -> Value:
        if self._next() in ("+", "-"):
            return self._sign() * self._product()
        found = self._power()
        while self._next() not in ("", "+", "-", ")", "]", "}", ",", "|"):
            if self._skip("/"):
                found /= self._sign() * self._power()
            elif self._skip("*"):
                found *= self._sign() * self._power()
            elif _is_number(self._next()):
                raise NotAnExpression("a number right after a factor")
            else:
                found *= self._power()
        return found

    def _power(self) -> Value:
        base = self._atom()
        while self._skip("!"):
            base = Fraction(math.factorial(_natural(base)))
        return _raised(base, self._argument()) if self._skip("^") else base

    def _atom(self) -> Value:
        token = self._left.pop()
        if _is_number(token):
            return Fraction(token)
        if closing := {"(": ")", "[": "]", "{": "}", "|": "|"}.get(token):
            found = self._sum()
            self._take(closing)
            if token == "|":
                found = abs(found) if isinstance(found, Fraction) else complex(abs(found))
            return found
        match token.removeprefix("\\"):
            case "frac":
                return self._argument() / self._argument()
            case "sqrt":
                degree: Value = Fraction(2)
                if self._skip("["):
                    degree = self._sum()
                    self._take("]")
                return _root(self._argument(), degree)
            case "binom":
                return Fraction(math.comb(_natural(self._argument()), _natural(self._argument())))
            case "log":
                base = self._argument() if self._skip("_") else Fraction(10)
                return cmath.log(self._of_function()) / cmath.log(complex(base))
            case name if name in _FUNCTIONS:
                return _FUNCTIONS[name](self._of_function())
            case name if name in _CONSTANTS:
                return _CONSTANTS[name]
            case name if len(name) == 1 and name.isalpha() or name in _GREEK:
                return self._variable(name)
        raise NotAnExpression(f"no expression begins with {token!r}")

    def _argument(self) -> Value:
        r"""A group, or one token: \frac12 is a half, and x^23 is x² · 3 in LaTeX."""
        if self._next() in ("{", "("):
            return self._atom()
        sign = self._sign()
        if self._next().isdigit():
            self._left += reversed(self._left.pop())
        return sign * self._atom()

    def _of_function(self) -> complex:
        if self._next() == "^":
            raise NotAnExpression("a power of a function's name")
        return complex(self._power())


def _is_number(token: str) -> bool:
    return token[:1].isdigit() or token[:1] == "."


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    for token in _TOKEN.findall(text):
        # Two letters are a product; more of them are a word.
        is_word = token.isalpha() and len(token) > 1
        if is_word and token not in _FUNCTIONS and token not in ("pi", "sqrt", "log"):
            if len(token) > 2:
                raise NotAnExpression(f"a word: {token}")
            found += list(token)
        elif token.strip():
            found.append(token)
    if not found:
        raise NotAnExpression("nothing")
    return found


def _raised(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction) and b.denominator == 1:
        bits = a.numerator.bit_length() + a.denominator.bit_length()
        if abs(b) <= MAX_POWER and bits * abs(b) <= MAX_BITS:
            return a ** int(b)
    return complex(a) ** complex(b)


def _root(a: Value, n: Value) -> Value:
    if isinstance(a, Fraction) and n == 2 and a >= 0:
        top, bottom = math.isqrt(a.numerator), math.isqrt(a.denominator)
        if top * top == a.numerator and bottom * bottom == a.denominator:
            return Fraction(top, bottom)
    if isinstance(a, Fraction) and a < 0 and isinstance(n, Fraction) and n.numerator % 2 == 1:
        return -(complex(-a) ** (1 / complex(n)))  # the real one
    return complex(a) ** (1 / complex(n))


def _natural(value: Value) -> int:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= MAX_POWER:
        return int(value)
    raise NotAnExpression("expected a natural number that is not too large")

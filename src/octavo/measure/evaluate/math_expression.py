r"""Values of expressions in LaTeX or plain text, without evaluating them as code.

Numbers are exact fractions as long as nothing irrational comes in, complex numbers after that.
Expressions with variables have values at points. What is too large or too deep is refused: a model
may write anything.
"""

import cmath
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Value = Fraction | complex
Point = Mapping[str, Value]
Node = Callable[[Point], Value]

MAX_CHARACTERS, MAX_DEPTH, MAX_POWER, MAX_BITS = 400, 40, 1000, 20_000

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\\.|[A-Za-z]+|.)")
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "ln": cmath.log,
    "exp": cmath.exp,
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
}
_CONSTANTS: dict[str, complex] = {"pi": cmath.pi + 0j, "e": cmath.e + 0j, "i": 1j}
_GREEK = {"alpha", "beta", "gamma", "theta", "lambda", "mu", "phi", "omega"}


class NotAnExpression(ValueError):
    """A text that is no expression, or has no value."""


class Expression:
    """A text as an expression; NotAnExpression if it is none."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise NotAnExpression("too long")
        self.variables: set[str] = set()
        self._tokens = _split(_with_mixed_numbers(text))
        self._place, self._depth = 0, 0
        self._node = self._sum()
        if self._place != len(self._tokens):
            raise NotAnExpression(f"expected an end, got {self._tokens[self._place]!r}")

    def value(self, point: Point) -> Value:
        """What it comes to with these values of its variables."""
        try:
            found = self._node(point)
        except (ArithmeticError, ValueError) as error:
            raise NotAnExpression(str(error)) from None
        if isinstance(found, complex) and not cmath.isfinite(found):
            raise NotAnExpression("not finite")
        return found

    def _peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self, expected: str = "") -> str:
        token = self._peek()
        if not token or (expected and token != expected):
            raise NotAnExpression(f"expected {expected or 'more'}, got {token!r}")
        self._place += 1
        return token

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnExpression("too deep")
        found = self._product()
        while self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            found = _combine(_plus if sign > 0 else _minus, found, self._product())
        self._depth -= 1
        return found

    def _product(self) -> Node:
        if self._peek() in ("+", "-"):
            sign = Fraction(1 if self._take() == "+" else -1)
            return _combine(_times, lambda point: sign, self._product())
        found = self._power()
        while self._peek() and self._peek() not in ("+", "-", ")", "]", "}", ",", "|"):
            if self._peek() in ("*", "/"):
                operation = _times if self._take() == "*" else _over
                factor = self._signed_power()
            elif self._peek()[0].isdigit() or self._peek()[0] == ".":
                raise NotAnExpression("a number right after a factor")
            else:
                operation, factor = _times, self._power()
            found = _combine(operation, found, factor)
        return found

    def _signed_power(self) -> Node:
        if self._peek() in ("+", "-"):
            sign = Fraction(1 if self._take() == "+" else -1)
            return _combine(_times, lambda point: sign, self._power())
        return self._power()

    def _power(self) -> Node:
        base = self._factorial()
        if self._peek() != "^":
            return base
        self._take()
        return _combine(_power, base, self._argument())

    def _factorial(self) -> Node:
        found = self._atom()
        while self._peek() == "!":
            self._take()
            found = _apply(_factorial, found)
        return found

    def _atom(self) -> Node:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return _constant(Fraction(token))
        closing = {"(": ")", "[": "]", "{": "}", "|": "|"}.get(token)
        if closing:
            found = self._sum()
            self._take(closing)
            return _apply(_absolute, found) if token == "|" else found
        return self._named(token)

    def _named(self, token: str) -> Node:
        name = token.removeprefix("\\")
        if name == "frac":
            return _combine(_over, self._argument(), self._argument())
        if name == "sqrt":
            root: Node = _constant(Fraction(2))
            if self._peek() == "[":
                self._take()
                root = self._sum()
                self._take("]")
            return _combine(_root, self._argument(), root)
        if name == "binom":
            return _combine(_binomial, self._argument(), self._argument())
        if name in _FUNCTIONS:
            return _apply(_of_complex(_FUNCTIONS[name]), self._function_argument())
        if name == "log":
            base: Node = _constant(Fraction(10))
            if self._peek() == "_":
                self._take()
                base = self._argument()
            return _combine(_logarithm, self._function_argument(), base)
        if name in _CONSTANTS:
            return _constant(_CONSTANTS[name])
        if len(name) == 1 and name.isalpha() or name in _GREEK:
            self.variables.add(name)
            return lambda point: point[name]
        raise NotAnExpression(f"no expression begins with {token!r}")

    def _argument(self) -> Node:
        r"""A group, or one token: \frac12 is a half, and x^23 is x² · 3 in LaTeX."""
        if self._peek() in ("{", "("):
            return self._atom()
        sign = Fraction(1)
        if self._peek() == "-":
            self._take()
            sign = Fraction(-1)
        token = self._peek()
        if len(token) > 1 and token.isdigit():
            self._tokens[self._place : self._place + 1] = list(token)
        found = self._atom()
        return found if sign == 1 else _combine(_times, _constant(sign), found)

    def _function_argument(self) -> Node:
        if self._peek() == "^":
            raise NotAnExpression("a power of a function's name")
        return self._power()


def _split(text: str) -> list[str]:
    tokens: list[str] = []
    for token in _TOKEN.findall(text):
        # Two letters are a product; more of them are a word.
        is_word = token.isalpha() and len(token) > 1
        if is_word and token not in _FUNCTIONS and token not in ("pi", "sqrt", "log"):
            if len(token) > 2:
                raise NotAnExpression(f"a word: {token}")
            tokens += list(token)
        elif token.strip():
            tokens.append(token)
    if not tokens:
        raise NotAnExpression("nothing")
    return tokens


def _with_mixed_numbers(text: str) -> str:
    """3\\frac{1}{2} and 3 1/2 are sums."""
    text = re.sub(r"(?<![\w.}])(\d+)\s*(\\frac\{\d+\}\{\d+\}|\\frac\d\d)", r"(\1+\2)", text)
    return re.sub(r"(?<![\w.}])(\d+)\s+(\d+)/(\d+)", r"(\1+\2/\3)", text)


def _constant(value: Value) -> Node:
    return lambda point: value


def _apply(function: Callable[[Value], Value], node: Node) -> Node:
    return lambda point: function(node(point))


def _combine(function: Callable[[Value, Value], Value], left: Node, right: Node) -> Node:
    return lambda point: function(left(point), right(point))


def _of_complex(function: Callable[[complex], complex]) -> Callable[[Value], Value]:
    return lambda value: function(complex(value))


def _exact_if_can(operation: Callable[[Any, Any], Any]) -> Callable[[Value, Value], Value]:
    """An operation of two fractions, or else of two complex numbers."""

    def compute(a: Value, b: Value) -> Value:
        is_exact = isinstance(a, Fraction) and isinstance(b, Fraction)
        found: Value = operation(a, b) if is_exact else operation(complex(a), complex(b))
        return found

    return compute


_plus, _minus, _times, _over = map(
    _exact_if_can, (operator.add, operator.sub, operator.mul, operator.truediv)
)


def _power(a: Value, b: Value) -> Value:
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


def _logarithm(a: Value, base: Value) -> Value:
    return cmath.log(complex(a)) / cmath.log(complex(base))


def _absolute(a: Value) -> Value:
    return abs(a) if isinstance(a, Fraction) else complex(abs(a))


def _natural(value: Value) -> int:
    is_one = isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= MAX_POWER
    if not is_one:
        raise NotAnExpression("expected a natural number that is not too large")
    assert isinstance(value, Fraction)
    return int(value)


def _factorial(value: Value) -> Value:
    return Fraction(math.factorial(_natural(value)))


def _binomial(n: Value, k: Value) -> Value:
    return Fraction(math.comb(_natural(n), _natural(k)))

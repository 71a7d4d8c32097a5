"""Searching with a regular expression in bounded time, whatever the expression.

Python's `re` tries one way through an expression after the other: `(a+)+$` takes it 2^n steps for a
text of n letters. Here all ways advance together. A set of positions, the bits of an integer, goes
through the expression from left to right, and what comes out are the positions where a match can
end. Only whether there is a match is asked for, so greedy and lazy repeats mean the same.

`re` parses the expression and judges single characters and anchors. Backreferences, atomic groups
and possessive repeats depend on which way was taken, and are refused.
"""

import re
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Any

from octavo.errors import ConfigError

MAX_STEPS = 100_000  # about 0.1 s

_parser: Any = import_module("re._parser")
_compiler: Any = import_module("re._compiler")
_ALPHABETS = re.ASCII | re.UNICODE
_SCOPED_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | _ALPHABETS


class _Text:
    """A text, the steps taken so far, and where the parts of an expression match."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.everywhere = (1 << (len(text) + 1)) - 1
        self.num_steps = 0
        # Repeats inside of repeats ask the same again and again.
        self.repeated: dict[tuple[_Step, int], int] = {}
        self.letters: dict[str, int] = {}  # where each character is
        for position, letter in enumerate(text):
            self.letters[letter] = self.letters.get(letter, 0) | 1 << position
        self._places: dict[re.Pattern[str], int] = {}

    def places(self, leaf: re.Pattern[str]) -> int:
        """The positions where a class of characters or an anchor matches."""
        if leaf not in self._places:
            positions = range(len(self.text) + 1)
            self._places[leaf] = sum(1 << i for i in positions if leaf.match(self.text, i))
        return self._places[leaf]

    def step(self) -> None:
        """Count a repetition or an assertion; ConfigError if there were too many."""
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            raise ConfigError(
                f"the expression needs more than {MAX_STEPS:,} steps for {self.text[:60]!r}: "
                "expected a simpler one, with fewer repeats inside of repeats"
            )


# From the positions where it may begin to those where it may end.
_Step = Callable[[_Text, int], int]


def bounded_search(pattern: str) -> Callable[[str], bool]:
    """A function that says whether the expression matches anywhere in a text, as `re.search` does.

    Raises ConfigError for what it does not support, and re.error, OverflowError or RecursionError
    as `re.compile` does; the function raises ConfigError if an expression takes too many steps.
    """
    flags = re.compile(pattern).flags
    whole = _sequence(_parser.parse(pattern), flags)
    return lambda text: whole(subject := _Text(text), subject.everywhere) != 0


def _sequence(parsed: Any, flags: int) -> _Step:
    steps = [_node(operation, argument, flags) for operation, argument in parsed]

    def run(text: _Text, starts: int) -> int:
        for step in steps:
            starts = step(text, starts)
            if not starts:
                break
        return starts

    return run


def _node(operation: Any, argument: Any, flags: int) -> _Step:
    match str(operation):
        case "LITERAL" if not flags & re.IGNORECASE:
            letter = chr(argument)
            return lambda text, starts: (starts & text.letters.get(letter, 0)) << 1
        case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
            leaf = _leaf(operation, argument, flags)
            return lambda text, starts: (starts & text.places(leaf)) << 1
        case "AT":
            leaf = _leaf(operation, argument, flags)
            return lambda text, starts: starts & text.places(leaf)
        case "SUBPATTERN":
            _, added, removed, body = argument
            if added & _ALPHABETS:  # of ASCII and Unicode one holds
                removed |= _ALPHABETS
            return _sequence(body, flags & ~removed | added)
        case "BRANCH":
            branches = [_sequence(body, flags) for body in argument[1]]
            return lambda text, starts: reduce(or_, [run(text, starts) for run in branches])
        case "MAX_REPEAT" | "MIN_REPEAT":
            low, high, body = argument
            return _repeat(_sequence(body, flags), int(low), int(high))
        case "ASSERT" | "ASSERT_NOT":
            direction, body = argument
            is_wanted = str(operation) == "ASSERT"
            return _assertion(_sequence(body, flags), direction < 0, is_wanted)
        case "FAILURE":  # (?!)
            return lambda text, starts: 0
        case other:
            what = other.lower().replace("_", " ").replace("groupref", "backreference")
            raise ConfigError(f"expected no backreferences or atomic groups, got a {what}")


def _leaf(operation: Any, argument: Any, flags: int) -> re.Pattern[str]:
    """An expression of one character or anchor alone."""
    state = _parser.State()
    state.flags = flags & _SCOPED_FLAGS
    parsed = _parser.SubPattern(state, [(operation, argument)])
    compiled: re.Pattern[str] = _compiler.compile(parsed)
    return compiled


def _repeat(body: _Step, low: int, high: int) -> _Step:
    def run(text: _Text, starts: int) -> int:
        if (run, starts) in text.repeated:
            return text.repeated[run, starts]
        begins = starts
        # Further repetitions than there are characters match nothing, and change nothing.
        most = len(text.text) + 1
        for _ in range(min(low, most)):
            text.step()
            starts = body(text, starts)
        found = new = starts
        for _ in range(min(high - low, most)):
            if not new:
                break
            text.step()
            new = body(text, new) & ~found
            found |= new
        text.repeated[run, begins] = found
        return found

    return run


def _assertion(body: _Step, looks_back: bool, is_wanted: bool) -> _Step:
    def run(text: _Text, starts: int) -> int:
        there = 0
        if looks_back:  # of one length only: where it ends says where it began
            there = starts & body(text, text.everywhere)
        else:
            for position in [1 << i for i in range(len(text.text) + 1) if starts >> i & 1]:
                text.step()
                there |= position if body(text, position) else 0
        return there if is_wanted else starts & ~there

    return run

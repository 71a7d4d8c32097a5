"""Whether a program that a model has written passes a problem's tests, in the sandbox.

A program passes a test as in LiveCodeBench: line by line it prints what is expected, but for spaces
around a line and how numbers are written; a function returns a value that is equal.
"""

import json
import os
import platform
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from octavo.measure.evaluate.code_data import Problem, Test
from octavo.measure.evaluate.sandbox import Limits, check_sandbox, run_program

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
# What solutions on the sites of these problems find imported.
PRELUDE = """
from bisect import *; from collections import *; from copy import *; from functools import *
from heapq import *; from itertools import *; from math import *; from operator import *
from random import *; from re import *; from string import *; from typing import *
from io import *; from builtins import *
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator
import os, random, re, statistics, string, sys, time
sys.setrecursionlimit(50000)
"""
RUN = PRELUDE + "exec(compile({code!r}, 'solution.py', 'exec'), globals())\n"
# The result alone goes to the real output: a function may print.
CALL = """
import json, os, sys
_out = os.dup(1)
os.dup2(2, 1)
_given = [json.loads(line) for line in sys.stdin.read().split("\\n") if line.strip()]
{run}
_owner = globals().get("Solution")
_call = getattr(_owner(), {name!r}) if _owner is not None else globals()[{name!r}]
os.write(_out, json.dumps(_call(*_given)).encode())
"""


class CodeJudge:
    """Tells which program a text ends up with, and whether it passes its problem's tests."""

    def __init__(self, problems: Iterable[Problem], limits: Limits | None = None) -> None:
        check_sandbox()
        self.limits = Limits() if limits is None else limits
        self.name = f"sandbox, {self.limits.cpu_s} s a test, Python {platform.python_version()}"
        self.num_workers = max(1, (os.cpu_count() or 1) // 2)
        self._problems = {problem.name: problem for problem in problems}

    def judge(self, text: str, true: str) -> tuple[str | None, bool]:
        """The last program that a text has between fences, None without, and whether it is right.

        true: the name of the problem.
        """
        code = read_code(text)
        if code is None:
            return None, False
        problem = self._problems[true]
        return code, all(self._passes(code, problem, test) for test in problem.tests())

    def close(self) -> None:
        """Nothing stays open."""

    def _passes(self, code: str, problem: Problem, test: Test) -> bool:
        program = RUN.format(code=code)
        if test.kind == "functional":
            program = CALL.format(run=program, name=problem.function)
        ended = run_program(program, test.given, self.limits)
        if ended.exit_code != 0:
            return False
        printed = ended.output.decode(errors="replace")
        if test.kind == "functional":
            return _is_same_value(printed, test.expected)
        return is_same_output(printed, test.expected)


def read_code(text: str) -> str | None:
    """The last block between fences; None if there is none."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks and blocks[-1].strip() else None


def is_same_output(printed: str, expected: str) -> bool:
    """Whether all lines are the same, as texts or as numbers."""
    ours, theirs = ([line.strip() for line in t.strip().split("\n")] for t in (printed, expected))
    return len(ours) == len(theirs) and all(map(_is_same_line, ours, theirs))


def _is_same_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    ours, theirs = printed.split(), expected.split()
    try:
        return bool(theirs) and list(map(Decimal, ours)) == list(map(Decimal, theirs))
    except InvalidOperation:
        return False


def _is_same_value(printed: str, expected: str) -> bool:
    try:
        return bool(json.loads(printed) == json.loads(expected))
    except (ValueError, RecursionError):
        return False

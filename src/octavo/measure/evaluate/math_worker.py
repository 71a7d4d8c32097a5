"""The process that judges answers of mathematics; math_judge.py starts it, as a script.

A line of JSON comes in, [text, true answer]; a line goes out, [found answer or null, is right]. It
imports math-verify alone: what a model writes may take its time, its memory or the whole process.
"""

import json
import logging
import resource
import sys
from typing import TextIO

MAX_BYTES = 2 * 2**30
TIMEOUT_S = 5  # of reading one answer, and of comparing two


def serve(lines: TextIO, answers: TextIO) -> None:
    """Judge line by line, until there are no more; the first answer says what went wrong before."""

    def answer(text: str | None, is_right: bool) -> None:
        print(json.dumps([text, is_right]), file=answers, flush=True)

    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except Exception as error:  # it looks for a version of antlr that it knows
        return answer(f"{type(error).__name__}: {error}", False)
    answer(None, True)
    # A box counts before all else.
    forms = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def read(text: str) -> list[object]:
        found: list[object] = parse(text, forms, parsing_timeout=TIMEOUT_S)
        return found

    def judge(text: str, true: str) -> tuple[str | None, bool]:
        parts = read(text)  # an expression, and the text that it was read from
        if not parts:
            return None, False
        found = str(parts[-1])
        # Between dollar signs both are read by the same rules, without a sentence around them.
        right = read(f"${true}$") or [true]
        is_right = bool(verify(right, read(f"${found}$"), timeout_seconds=TIMEOUT_S))
        return found, is_right

    for line in lines:
        answer(*judge(*json.loads(line)))


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # math-verify's, about answers that take too long
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    serve(sys.stdin, sys.stdout)

r"""The final answer in a model's text: a letter after "Answer:", or what is in \boxed{}.

What a model thinks before </think> is no answer; a thought that never ends has none.
"""

import re

_COMMAND = r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|mathsf)\s*\{[ \t$(*]*"
_LETTER = r"([A-Za-z])(?![A-Za-z0-9'’])"
# Answer: C, **Answer:** (C), Answer: $\boxed{\text{C}}$
_CHOICE = re.compile(rf"(?i:\banswer)[*_]*[ \t]*:[ \t*_$(\[{{]*(?:{_COMMAND})*{_LETTER}")
_BOXED_CHOICE = re.compile(rf"[\s$(*]*(?:{_COMMAND})*[A-Za-z](?![A-Za-z0-9])")
_MATH = re.compile(
    r"(?i:\banswer)[*_]*[ \t]*(?:is[ \t]*:?|:)(?P<bold>[*_]*)[ \t]*(?P<answer>[^\n]+)"
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def visible(text: str) -> str | None:
    """The text after its thoughts; None if they never end."""
    before, end, after = text.rpartition("</think>")
    if end:
        return after
    return None if "<think>" in text else before + after


def last_boxed(text: str) -> str | None:
    """What the last whole box holds, braces in it and all; None without any."""
    for mark in reversed(list(_BOX.finditer(text))):
        if text[mark.end() : mark.end() + 1] == "{":
            inside = _braced(text, mark.end())
        else:  # \boxed 5
            word = re.match(r"[^\s${}]+", text[mark.end() :])
            inside = word[0] if word else None
        if inside is not None and inside.strip():
            return inside.strip()
    return None


def read_letter(text: str, letters: str) -> str | None:
    """The letter that the text ends up with: its last "Answer: X", else its last box.

    None if there is none, or if it is none of the options' letters.
    """
    shown = visible(text)
    if shown is None:
        return None
    found = None
    for match in _CHOICE.finditer(shown):
        # "answer: a good one" is no choice; "answer: a" is.
        rest = shown[match.end() :].split("\n", 1)[0]
        if match[1].isupper() or not re.search(r"[A-Za-z]", rest):
            found = match[1].upper()
    if found is None and (boxed := last_boxed(shown)) is not None:
        match_boxed = _BOXED_CHOICE.match(boxed)
        found = match_boxed[0][-1].upper() if match_boxed else None
    return found if found is not None and found in letters else None


def read_math(text: str) -> str | None:
    """What the text ends up with: its last box, else what follows its last "answer is" or ":"."""
    shown = visible(text)
    if shown is None:
        return None
    boxed = last_boxed(shown)
    if boxed is not None:
        return boxed
    matches = list(_MATH.finditer(shown))
    if not matches:
        return None
    # "The answer is 12. I have checked it." ends with its sentence.
    line = re.split(r"\.(?:\s|$)", matches[-1]["answer"].strip())[0]
    return line.strip(" *_`") or None


def _braced(text: str, start: int) -> str | None:
    """What is between the brace at `start` and the one that closes it; None if none does."""
    depth, place = 0, start
    while place < len(text):
        match text[place]:
            case "\\":
                place += 1  # \{ is no brace
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return text[start + 1 : place]
        place += 1
    return None

r"""The answer of a problem in one spelling: no units, degrees, separators, spaces or delimiters."""

import re

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

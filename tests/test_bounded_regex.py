"""bounded_search finds what re.search finds, in bounded time."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bounded_regex import bounded_search
from octavo.errors import ConfigError
from octavo.patterns import Layer, match_layers

LEAVES = ["a", "b", ".", r"\.", "[ab]", "[^a.]", r"\d", r"\w", r"\W", "^", "$", r"\b", r"\B", r"\Z"]
LEAVES += ["(?i:A)", "(?=a)", "(?!b)", "(?<=a)", "(?<!b)", "", "é", r"[\d_-]", "(?!)"]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}", "{2,3}?"]


def _larger(inner):
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda x: f"({'|'.join(x)})"),
        st.tuples(inner, st.sampled_from(REPEATS)).map(lambda x: f"(?:{x[0]}){x[1]}"),
        inner.map(lambda x: f"(?=.*{x})"),
        inner.map(lambda x: f"(?P<n{abs(hash(x))}>{x})"),
    )


EXPRESSIONS = st.recursive(st.sampled_from(LEAVES), _larger, max_leaves=8)
TEXTS = st.text("abAB.1_é\n", max_size=8)


@given(EXPRESSIONS, st.lists(TEXTS, min_size=1, max_size=5), st.sampled_from(["", "(?i)", "(?s)"]))
def test_it_finds_what_re_finds(expression, texts, flags):
    try:
        expected = re.compile(flags + expression)
    except re.error:  # two groups of one name
        with pytest.raises(re.error):
            bounded_search(flags + expression)
        return
    search = bounded_search(flags + expression)
    for text in texts:
        assert search(text) == (expected.search(text) is not None), text


NAMES = {"letters": "a" * 200, "end": "a" * 199 + "!", "dots": "aaa." * 50}
NOWHERE: set[str] = set()
EVIL = {  # and in which of these names there is a match
    "(a+)+$": {"letters"},
    "(a|a)*$": {"letters", "end", "dots"},  # of nothing, at the end
    "(a|aa)+$": {"letters"},
    "(.*)*x": NOWHERE,
    r"(\w+\.)+x": NOWHERE,
    "(a*)*b": NOWHERE,
    "((a{1,1000}){1,1000}){1,1000}x": NOWHERE,
    "(?:a?){200}a{200}": {"letters"},
    ".*.*.*.*.*.*.*.*x": NOWHERE,
    "(?=(a+)+$)b": NOWHERE,
    "(?:(?=a*$)a)*x": NOWHERE,
    "(x?a|a?x|a)*x": NOWHERE,
    "(" * 150 + "a+" + ")+" * 150 + "x": NOWHERE,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("expression", EVIL)
def test_evil_expressions_are_answered_at_once(expression, name):
    start = time.process_time()  # other programs may keep the machine busy
    assert bounded_search(expression)(NAMES[name]) == (name in EVIL[expression])
    assert time.process_time() - start < 2


def test_patterns_of_layers_use_it():
    layers = [Layer("blocks.0." + NAMES["end"]), Layer("blocks.1.mlp.up")]
    assert match_layers(["re:(a|aa)+!$"], layers) == layers[:1]
    assert match_layers([r"re:^(\w+\.)+up$"], layers) == layers[1:]
    with pytest.raises(ConfigError, match="matches none of the 2 layers"):
        match_layers(["re:(a+)+$"], layers)


@pytest.mark.parametrize("expression", [r"(a)\1", "(?>a+)b", "a++b", "(a)?(?(1)b|c)"])
def test_what_depends_on_the_way_taken_is_refused(expression):
    with pytest.raises(ConfigError, match="expected no backreferences or atomic groups, got a"):
        bounded_search(expression)
    with pytest.raises(ConfigError, match=r"expected a regular expression after re:, got"):
        match_layers([f"re:{expression}"], [Layer("a")])


def test_an_expression_that_takes_too_long_is_an_error():
    layers = [Layer("a" * 200)]
    deep = "(?:(?=(?:(?=(?:(?=a*)a)*)a)*)a)*x"
    with pytest.raises(ConfigError, match=r"pattern 're:.*needs more than 100,000 steps for 'aa"):
        match_layers([f"re:{deep}"], layers)

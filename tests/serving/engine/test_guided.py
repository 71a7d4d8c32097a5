"""Guided decoding: whatever the logits are, the answer follows its grammar and then ends."""

import json
import math
import re
import sys

import pytest
import torch

pytest.importorskip("llguidance")
pytest.importorskip("transformers")
from octavo.errors import ConfigError, UnsupportedError
from octavo.serving.engine.guided import Grammar, tool_call_schema
from octavo.serving.engine.request import Sampling
from octavo.serving.engine.sampler import Sampler, SamplerRow
from octavo_testkit.models import tokenizers_of_kinds as kinds

EOS = kinds.EOS
OBJECT = {"type": "object"}
BYTE_LEVEL, BYTE_FALLBACK = kinds.byte_level_with_eos(), kinds.byte_fallback()
EXTRA = 20  # logits that the tokenizer has no token for
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def bits(state):
    """The allowed tokens as a set."""
    words = state.allowed("cpu")
    assert words.dtype == torch.int32
    every = (words[:, None] >> torch.arange(32)) & 1
    return set(every.flatten().nonzero().flatten().tolist())


def answer(grammar, seed, tokenizer=BYTE_LEVEL, max_tokens=600):
    """What random logits write under the grammar; None if it took too long. EOS is not in it."""
    size = tokenizer.get_vocab_size() + EXTRA
    generator = torch.Generator().manual_seed(seed)
    sampler, state, tokens = Sampler(size, "cpu"), grammar.start(), []
    sampling = Sampling(max_tokens=max_tokens)
    while len(tokens) < max_tokens:
        logits = 3 * torch.randn(1, size, generator=generator)
        row = SamplerRow(sampling, (), tokens, seed, state.allowed("cpu"))
        token = sampler.sample(logits, [row])[0].token
        assert token == EOS or token >= len(kinds.SPECIAL)
        state.advance(token)
        if token == EOS:
            assert state.is_finished
            return tokenizer.decode(tokens)
        tokens.append(token)
    return None


def answers(grammar, num=25, **options):
    found = [answer(grammar, seed, **options) for seed in range(num)]
    ended = [text for text in found if text is not None]
    assert len(ended) > num / 2
    return ended


def of(tokens, tokenizer=BYTE_LEVEL):
    return tokenizer.encode(tokens, add_special_tokens=False).ids


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
def test_json_follows_its_schema(tokenizer):
    grammar = Grammar.from_json_schema(PERSON, tokenizer, eos_tokens=[EOS])
    ages = set()
    for text in answers(grammar, tokenizer=tokenizer):
        person = json.loads(text)
        assert list(person) == ["name", "age", "tags"]
        assert isinstance(person["name"], str)
        assert len(person["name"]) <= 8
        assert type(person["age"]) is int
        assert 0 <= person["age"] <= 150
        assert len(person["tags"]) <= 3
        assert all(tag in ["a", "b", 3, None] for tag in person["tags"])
        ages.add(person["age"])
    assert len(ages) > 5


def test_a_schema_may_be_text():
    grammar = Grammar.from_json_schema(json.dumps({"enum": ["x", 7]}), BYTE_LEVEL, eos_tokens=[EOS])
    assert {json.loads(text) for text in answers(grammar)} == {"x", 7}


def test_any_json_object():
    state = Grammar.from_json_schema(OBJECT, BYTE_LEVEL, eos_tokens=[EOS]).start()
    for token in of('{"a": [1, {"b": null}], "é": "日"}'):
        assert token in bits(state)
        state.advance(token)
    assert state.is_finished
    assert bits(state) == {EOS}
    state = Grammar.from_json_schema(OBJECT, BYTE_LEVEL, eos_tokens=[EOS]).start()
    assert not bits(state) & set(of('["1t'))


def test_choices():
    choices = ["yes", "yes, but", 'a "quote" \\ and 日本 🙂\n', "$x | /y/"]
    grammar = Grammar.from_choices(choices, BYTE_LEVEL, eos_tokens=[EOS])
    assert set(answers(grammar, num=60)) == set(choices)


@pytest.mark.parametrize("regex", [r"[0-9]{3}-[a-c]+x?", r"(é|日){2,4}", r"[\d]\d/\d\w", "a\n+b?"])
def test_regex(regex):
    grammar = Grammar.from_regex(regex, BYTE_LEVEL, eos_tokens=[EOS])
    found = answers(grammar)
    assert all(re.fullmatch(regex, text, re.ASCII) for text in found)
    assert len(set(found)) > 2


@pytest.mark.slow
def test_a_tool_call():
    area = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}, "unit": {"enum": ["m", "km"]}},
        "required": ["at", "unit"],
        "additionalProperties": False,
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    }
    clock = {"type": "object", "properties": {}, "additionalProperties": False}
    schema = tool_call_schema({"area": area, "clock": clock})
    grammar = Grammar.from_json_schema(schema, BYTE_LEVEL, eos_tokens=[EOS])
    names = set()
    for text in answers(grammar):
        call = json.loads(text)
        assert list(call) == ["name", "arguments"]
        names.add(call["name"])
        if call["name"] == "clock":
            assert call["arguments"] == {}
        else:
            assert call["arguments"]["unit"] in ("m", "km")
            assert all(type(value) is int for value in call["arguments"]["at"])
            assert len(call["arguments"]["at"]) <= 2
    assert names == {"area", "clock"}
    with pytest.raises(ConfigError, match="one tool or more"):
        tool_call_schema({})


def test_eos_only_where_the_answer_is_complete():
    grammar = Grammar.from_regex("[0-9]{2,3}", BYTE_LEVEL, eos_tokens=[EOS, 1])
    state = grammar.start()
    for digit, ends in [("1", False), ("2", True), ("3", True)]:
        assert not state.is_finished
        (token,) = of(digit)
        state.advance(token)
        assert ({EOS, 1} & bits(state) == {EOS, 1}) == ends
        assert ends or not {EOS, 1} & bits(state)
    assert state.is_finished
    assert bits(state) == {EOS, 1}
    state.advance(1)
    assert state.is_finished
    early = grammar.start()
    with pytest.raises(ConfigError, match="expected a token that the grammar allows, got 2"):
        early.advance(EOS)
    assert not early.is_finished


def test_special_tokens_are_never_text():
    # "<s>" may be written, letter by letter, but not by the token of that name.
    state = Grammar.from_regex("(.|\n)*", BYTE_LEVEL, eos_tokens=[EOS]).start()
    assert bits(state) & {0, 1, 2, 3} == {EOS}
    assert len(bits(state)) > 200
    assert max(bits(state)) < BYTE_LEVEL.get_vocab_size()
    for letter in "<s>":
        state.advance(of(letter)[0])
    with pytest.raises(ConfigError):
        state.advance(1)


def test_bytes_of_a_character_must_make_one():
    state = Grammar.from_choices(["é", "日"], BYTE_LEVEL, eos_tokens=[EOS]).start()
    names = {BYTE_LEVEL.id_to_token(token) for token in bits(state)}
    assert {"Ã", "æ"} <= names  # the first bytes, as byte-level tokenizers write them
    assert "A" not in names


def test_answers_of_one_grammar_do_not_meet():
    grammar = Grammar.from_choices(["ab", "cd"], BYTE_LEVEL, eos_tokens=[EOS])
    first, second = grammar.start(), grammar.start()
    first.advance(of("a")[0])
    assert bits(first) == set(of("b"))
    assert set(of("c")) <= bits(second)
    assert bits(grammar.start()) == bits(second)


def test_whitespace_comes_to_an_end():
    state = Grammar.from_json_schema(PERSON, BYTE_LEVEL, eos_tokens=[EOS]).start()
    state.advance(of("{")[0])
    (space,) = of(" ")
    count = 0
    while space in bits(state):
        state.advance(space)
        count += 1
        assert count <= 16
    assert count == 16


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "format": "no such format"},
        {"type": "no such type"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"$ref": "https://example.org/schema"},
        {"x-guidance": {"lenient": True}, "not": {}},
        {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"minimum": 1}, {"minimum": 2}]},
        {"type": "string", "pattern": "(?=a)b"},
        {"default": {1, 2}},
        "no json",
        "[1]",
        '{}}], "grammars": [{"lark_grammar": "start: /a/"',
        "[" * 100_000,
        7,
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema):
    with pytest.raises(ConfigError, match="expected a JSON schema"):
        Grammar.from_json_schema(schema, BYTE_LEVEL, eos_tokens=[EOS])


def test_a_schema_that_is_too_deep_is_refused():
    deep = {"type": "integer"}
    for _ in range(2000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ConfigError, match="expected a JSON schema"):
        Grammar.from_json_schema(deep, BYTE_LEVEL, eos_tokens=[EOS])


@pytest.mark.parametrize("regex", ["a(b", "(?=a)b", r"(a)\1", "a\\"])
def test_a_regex_that_cannot_be_enforced_is_refused(regex):
    with pytest.raises(ConfigError, match="expected a regular expression"):
        Grammar.from_regex(regex, BYTE_LEVEL, eos_tokens=[EOS])


@pytest.mark.parametrize("choices", [[], "abc", ["a", 1]])
def test_choices_are_texts(choices):
    with pytest.raises(ConfigError, match="expected choices"):
        Grammar.from_choices(choices, BYTE_LEVEL, eos_tokens=[EOS])


def test_the_end_must_be_known():
    wrapped = kinds.byte_level()  # of transformers, without EOS
    with pytest.raises(ConfigError, match="give eos_tokens"):
        Grammar.from_json_schema(OBJECT, wrapped)
    with pytest.raises(ConfigError, match="give eos_tokens"):
        Grammar.from_json_schema(OBJECT, BYTE_LEVEL)
    wrapped.eos_token = "<pad>"
    state = Grammar.from_choices(["a"], wrapped).start()
    state.advance(of("a", wrapped.backend_tokenizer)[0])
    assert bits(state) == {wrapped.eos_token_id}


def test_a_tokenizer_without_bytes_is_refused():
    for tokenizer in (kinds.words(), kinds.word_piece(), object()):
        with pytest.raises(UnsupportedError, match="tokenizer"):
            Grammar.from_json_schema(OBJECT, tokenizer, eos_tokens=[EOS])
    with pytest.raises(UnsupportedError, match="out of range"):
        Grammar.from_json_schema(OBJECT, BYTE_LEVEL, eos_tokens=[10**6])


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"pip install .*\[server\]'"):
        Grammar.from_json_schema(OBJECT, BYTE_LEVEL, eos_tokens=[EOS])


def test_a_forced_answer_beats_the_likeliest_token():
    state = Grammar.from_choices(["ab"], BYTE_LEVEL, eos_tokens=[EOS]).start()
    size = BYTE_LEVEL.get_vocab_size()
    logits = torch.full((1, size), 5.0)
    logits[0, of("a")[0]] = -40.0
    row = SamplerRow(Sampling(logprobs=0), (), (), 0, state.allowed("cpu"))
    logits[0, size - 1] = -math.inf
    sampled = Sampler(size, "cpu").sample(logits, [row])[0]
    assert BYTE_LEVEL.decode([sampled.token]) in ("a", "ab")
    assert sampled.logprobs.logprob < -5


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}])
def test_a_schema_that_only_refers_to_itself(schema):
    with pytest.raises(ConfigError, match="that none can"):
        Grammar.from_json_schema(schema, BYTE_LEVEL, eos_tokens=[EOS])
    other = {"anyOf": [schema, {"const": 7}]}
    assert Grammar.from_json_schema(other, BYTE_LEVEL, eos_tokens=[EOS]).start() is not None

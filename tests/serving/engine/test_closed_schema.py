"""Objects of tools' schemas that may have nothing but what they declare."""

import pytest

from octavo.errors import ConfigError
from octavo.serving.engine.guided import close_objects

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}}
OPEN = {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}


def closed(schema):
    return {**schema, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (CITY, closed(CITY)),
        (OPEN, OPEN),  # says otherwise
        ({"type": "object"}, {"type": "object"}),  # declares nothing
        (
            {"properties": {"to": CITY, "all": {"items": CITY}, "or": {"anyOf": [CITY, DAYS]}}},
            closed(
                {
                    "properties": {
                        "to": closed(CITY),
                        "all": {"items": closed(CITY)},
                        "or": {"anyOf": [closed(CITY), closed(DAYS)]},
                    }
                }
            ),
        ),
        (
            {"properties": {"to": {"$ref": "#/$defs/City"}}, "$defs": {"City": CITY}},
            closed(
                {"properties": {"to": {"$ref": "#/$defs/City"}}, "$defs": {"City": closed(CITY)}}
            ),
        ),
        ({"allOf": [CITY]}, {"allOf": [closed(CITY)]}),
        # Each of these would forbid what the other declares.
        ({"allOf": [CITY, DAYS]}, {"allOf": [CITY, DAYS]}),
        ({**CITY, "anyOf": [DAYS, {}]}, {**CITY, "anyOf": [DAYS, {}]}),
        (
            {**DAYS, "$ref": "#/$defs/City", "$defs": {"City": {**CITY, "items": DAYS}}},
            {**DAYS, "$ref": "#/$defs/City", "$defs": {"City": {**CITY, "items": closed(DAYS)}}},
        ),
        # Nothing is declared beside these properties.
        (
            {**CITY, "anyOf": [{"required": ["city"]}, {}]},
            closed({**CITY, "anyOf": [{"required": ["city"]}, {}]}),
        ),
        # Data is not a schema.
        (
            {"enum": [{"properties": 1}], "default": CITY},
            {"enum": [{"properties": 1}], "default": CITY},
        ),
    ],
)
def test_undeclared_properties(schema, expected):
    assert close_objects(schema) == expected


def test_references_that_lead_back_or_nowhere():
    node = {"properties": {"next": {"$ref": "#"}, "lost": {"$ref": "#/$defs/None/0"}}}
    assert close_objects(node) == closed(node)
    loop = {"allOf": [{"$ref": "#"}] * 30}
    assert close_objects(loop) == loop


def test_the_grammar_of_a_tool_takes_no_other_property():
    pytest.importorskip("llguidance")
    pytest.importorskip("tokenizers")
    from octavo.serving.engine.guided import Grammar
    from octavo.serving.server.guidance import call_schema
    from octavo.serving.server.schema import Function, Tool
    from octavo_testkit.models import tokenizers_of_kinds as kinds

    tokenizer = kinds.byte_level_with_eos()
    functions = {"go": CITY, "stop": None, "stay": OPEN}
    tools = {
        name: Tool(type="function", function=Function(name=name, parameters=parameters))
        for name, parameters in functions.items()
    }

    def takes(names, text):
        grammar = Grammar.from_json_schema(
            call_schema([tools[name] for name in names]), tokenizer, eos_tokens=[kinds.EOS]
        )
        state = grammar.start()
        try:
            for token in tokenizer.encode(text).ids:
                state.advance(token)
        except ConfigError:
            return False
        return True

    assert takes(["go"], '{"city": "Bern"}') and not takes(["go"], '{"town"')
    assert takes(["stop"], "{}") and not takes(["stop"], '{"a"')
    assert takes(["stay"], '{"a": "b"}')
    call = '{"name": "go", "arguments": {"%s"'
    assert takes(["go", "stop"], call % "city") and not takes(["go", "stop"], call % "town")

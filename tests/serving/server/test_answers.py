"""Text to content and tool calls, however it is cut."""

import pytest

pytest.importorskip("fastapi")

from hypothesis import given
from hypothesis import strategies as st

from octavo.serving.server.answers import (
    AnyCallReader,
    AutoCallReader,
    NamedCallReader,
)
from octavo.serving.server.guidance import call_schema
from octavo.serving.server.schema import Tool

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é<"}}\n</tool_call>'


def read(reader, parts):
    """(content, [(name, arguments), …]) of text that comes in parts."""
    pieces = [piece for part in parts for piece in reader.feed(part, is_last=False)]
    pieces += reader.feed("", is_last=True)
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    functions = [piece["function"] for piece in pieces if not isinstance(piece, str)]
    calls = [[one.get("name"), one["arguments"]] for one in functions]
    return content, calls


@pytest.mark.parametrize(
    ("text", "content", "names", "reason"),
    [
        ("", "", [], "stop"),
        ("plain <b> text", "plain <b> text", [], "stop"),
        ("almost <tool_cal", "almost <tool_cal", [], "stop"),
        (CALL, "", ["f"], "tool_calls"),
        (f"First.{CALL}\n{CALL}\n", "First.", ["f", "f"], "tool_calls"),
        (CALL.removesuffix("</tool_call>"), "", ["f"], "tool_calls"),
        ("<tool_call>no</tool_call>!", "<tool_call>no</tool_call>!", [], "stop"),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", [], "stop"),
        ("<tool_call>{unfinished", "<tool_call>{unfinished", [], "stop"),
    ],
)
@given(data=st.data())
def test_calls_of_the_models_own(text, content, names, reason, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    parts = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    reader = AutoCallReader()
    found, calls = read(reader, parts)
    assert found == content
    assert [name for name, _ in calls] == names
    assert reader.finish_reason == reason


def test_a_named_call_streams_its_arguments():
    reader = NamedCallReader("f", "stop")
    assert read(reader, ['{"x"', ": 1}"]) == ("", [["f", '{"x"'], [None, ": 1}"]])
    assert read(NamedCallReader("f", "stop"), []) == ("", [["f", ""]])


def test_one_of_several_calls_is_known_at_its_end():
    reader = AnyCallReader()
    assert read(reader, ['{"name": "f", ', '"arguments": {"x": 1}}']) == ("", [["f", '{"x": 1}']])
    assert reader.finish_reason == "tool_calls"
    cut = AnyCallReader()
    assert read(cut, ['{"name": "f", ']) == ('{"name": "f", ', [])
    assert cut.finish_reason == "stop"


def tool(name, **parameters):
    return Tool(type="function", function={"name": name, "parameters": parameters or None})


def test_the_schema_of_several_tools_keeps_their_definitions_apart():
    first = tool(
        "a", type="object", properties={"x": {"$ref": "#/$defs/t"}}, **{"$defs": {"t": {}}}
    )
    second = tool(
        "b",
        type="object",
        properties={"x": {"items": [{"$ref": "#/definitions/t"}]}},
        definitions={"t": {"$ref": "#/definitions/t"}},
    )
    schema = call_schema([first, second, tool("c")])
    calls = [call["properties"] for call in schema["anyOf"]]
    assert [call["name"] for call in calls] == [{"const": "a"}, {"const": "b"}, {"const": "c"}]
    at = "#/anyOf/{}/properties/arguments/{}/t"
    first_ref, second_ref = ({"$ref": at.format(*x)} for x in ((0, "$defs"), (1, "definitions")))
    assert calls[0]["arguments"]["properties"] == {"x": first_ref}
    assert calls[1]["arguments"]["properties"] == {"x": {"items": [second_ref]}}
    assert calls[1]["arguments"]["definitions"] == {"t": second_ref}
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    assert calls[2]["arguments"] == none  # OpenAI's meaning of a tool without parameters
    assert call_schema([first]) == {**first.function.parameters, "additionalProperties": False}

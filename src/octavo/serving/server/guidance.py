"""JSON schemas from response_format and tool_choice."""

from collections.abc import Callable, Sequence
from typing import Any

from octavo.errors import OctavoError
from octavo.serving.engine.closed_schema import close_objects
from octavo.serving.engine.guided import tool_call_schema
from octavo.serving.server.api_error import bad_request
from octavo.serving.server.schema import ChatRequest, NamedTool, ResponseFormat, Tool

Schema = dict[str, Any]
MakeGrammar = Callable[[Schema], Any]
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}}  # OpenAI's meaning of no parameters
MAX_DEPTH = 100


def format_schema(asked: ResponseFormat | None) -> Schema | None:
    """What an answer must be by its response_format; None for any text."""
    if asked is None or asked.type == "text":
        if asked is not None and asked.json_schema is not None:
            message = "expected type 'json_schema' beside json_schema, got 'text'"
            raise bad_request(message, "response_format")
        return None
    if asked.type == "json_object":
        return {"type": "object"}
    if asked.json_schema is None:
        message = "expected json_schema with type 'json_schema', got none"
        raise bad_request(message, "response_format")
    return asked.json_schema.schema_


def forced_tools(body: ChatRequest) -> tuple[Tool, ...]:
    """The tools of which one must be called: by name, or any of them; empty if none must."""
    tools = tuple(body.tools or ())
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("expected tools of different names, got one twice", "tools")
    match body.tool_choice:
        case None | "none" | "auto":
            return ()
        case "required":
            if not tools:
                raise bad_request("tool_choice 'required' needs tools, got none", "tool_choice")
            return tools
        case NamedTool(function=function):
            found = tuple(tool for tool in tools if tool.function.name == function.name)
            if not found:
                message = f"expected a name in tools ({', '.join(names)}), got {function.name!r}"
                raise bad_request(message, "tool_choice")
            return found


def call_schema(tools: Sequence[Tool]) -> Schema:
    """The arguments of one tool; of several, {"name": …, "arguments": …} of one of them.

    Properties that a tool does not declare are forbidden, unless its schema allows them.
    """
    schemas = {tool.function.name: tool.function.parameters or NO_ARGUMENTS for tool in tools}
    for schema in schemas.values():
        _check_depth(schema)
    schemas = {name: close_objects(schema) for name, schema in schemas.items()}
    return next(iter(schemas.values())) if len(schemas) == 1 else tool_call_schema(schemas)


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise bad_request(f"expected parameters at most {MAX_DEPTH} levels deep, got more", "tools")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            _check_depth(item, depth + 1)


def grammar_of(schema: Schema, make_grammar: MakeGrammar, param: str) -> Any:
    """The grammar of a schema; ApiError for a schema that cannot be followed."""
    try:
        return make_grammar(schema)
    except (OctavoError, ValueError, RecursionError) as error:
        message = str(error) or type(error).__name__
        raise bad_request(f"this JSON schema cannot be followed: {message}", param) from None

"""JSON schemas from response_format and tool_choice, their grammars, and what worker processes do.

Worker processes import this module and start often: it imports little.
"""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from octavo.errors import OctavoError
from octavo.serving.engine.guided import Grammar, close_objects, tool_call_schema
from octavo.serving.server.api_error import bad_request
from octavo.serving.server.prompts import MAX_DEPTH, Prompts, json_size
from octavo.serving.server.schema import ChatRequest, JsonSchema, NamedTool, ResponseFormat, Tool
from octavo.serving.server.workers import WorkerError, Workers, yield_to_others

Schema = dict[str, Any]
Followed = Schema | tuple[Tool, ...]  # what an answer must be: a value, or a call of one of these
MakeGrammar = Callable[[Schema], Any]
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}}  # OpenAI's meaning of no parameters
# The time to compile grows with the square of the properties.
MAX_PROPERTIES = 1000
MAX_SCHEMA_CHARS = 128 * 1024
COMPILE_S = 5.0
RETRY_S = 60.0
NUM_KEPT = 64


def format_schema(asked: ResponseFormat | None) -> Schema | None:
    """What an answer must be by its response_format; None for any text."""
    match asked:
        case None | ResponseFormat(type="text", json_schema=None):
            return None
        case ResponseFormat(type="json_object"):
            return {"type": "object"}
        case ResponseFormat(type="json_schema", json_schema=JsonSchema(schema_=schema)):
            return schema
    found = "none" if asked.json_schema is None else f"type {asked.type!r}"
    raise bad_request(f"expected json_schema with its type, got {found}", "response_format")


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
    schemas = {name: close_objects(schema) for name, schema in _parameters(tools).items()}
    return next(iter(schemas.values())) if len(schemas) == 1 else tool_call_schema(schemas)


def _parameters(tools: Sequence[Tool]) -> dict[str, Schema]:
    return {tool.function.name: tool.function.parameters or NO_ARGUMENTS for tool in tools}


def check_size(asked: Followed, param: str) -> int:
    """The characters of a schema; ApiError if it is larger or deeper than this server compiles."""
    schema = asked if isinstance(asked, dict) else _parameters(asked)
    num_chars, num_properties, depth = json_size(schema)
    for what, found, limit in (
        ("levels", depth, MAX_DEPTH),
        ("characters", num_chars, MAX_SCHEMA_CHARS),
        ("properties", num_properties, MAX_PROPERTIES),
    ):
        if found > limit:
            message = f"the JSON schema is too large: {limit:,} {what} at most"
            raise bad_request(message, param, "schema_too_large")
    return num_chars


def guided_grammars(engine: Any) -> MakeGrammar:
    """Makes the grammars of a model's answers; pickle takes it to other processes."""
    # The model's own: a tokenizer may name another end, or none. It must know them, though.
    own = getattr(engine, "eos_tokens", ())
    ends = [token for token in own if token < len(engine.tokenizer)] or None
    return partial(Grammar.from_json_schema, tokenizer=engine.tokenizer, eos_tokens=ends)


class GrammarCache:
    """The grammars of schemas that clients send: each is tried in a worker before it is made here.

    A schema may take a compiler minutes, gigabytes, or its life. The last ones are kept, refused
    ones too; what failed for want of time is tried again later.
    """

    def __init__(self, make: MakeGrammar, workers: Workers) -> None:
        self._make, self._workers = make, workers
        self._thread = ThreadPoolExecutor(1, "octavo-grammars", initializer=yield_to_others)
        # The grammar or why there is none, and until when that holds; the last used last.
        self._kept: dict[bytes, tuple[Any, float]] = {}

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def get(self, asked: Followed, param: str) -> Any:
        """The grammar to follow; ApiError for a schema that is too large or cannot be followed."""
        num_chars = check_size(asked, param)
        written = json.dumps(["call", _parameters(asked)] if isinstance(asked, tuple) else asked)
        key = hashlib.sha256(written.encode()).digest()
        found, until_s = self._kept.pop(key, (None, 0.0))
        if time.monotonic() >= until_s:
            keep_s, run, loop = math.inf, self._workers.run, asyncio.get_running_loop()
            try:
                schema = await run(try_schema, asked, limit_s=COMPILE_S, size=num_chars)
                found = await loop.run_in_executor(self._thread, self._make, schema)
            except WorkerError as error:
                found, keep_s = str(error), RETRY_S
            except (OctavoError, ValueError, RecursionError) as error:
                found = str(error) or type(error).__name__
            until_s = time.monotonic() + keep_s
        self._kept[key] = found, until_s  # behind all others
        if len(self._kept) > NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        if isinstance(found, str):
            raise bad_request(f"this JSON schema cannot be followed: {found}", param)
        return found


class WorkerTools(Prompts):
    """What tasks in a worker process use, the methods of Prompts and others; made there."""

    def __init__(self, tokenizer: Any, max_context: int, make_grammar: MakeGrammar) -> None:
        super().__init__(tokenizer, max_context)
        self.make_grammar = make_grammar


def try_schema(tools: WorkerTools, asked: Followed) -> Schema:
    """The schema to follow, whose grammar was made in this worker to see that it can be made."""
    schema = call_schema(asked) if isinstance(asked, tuple) else asked
    tools.make_grammar(schema)
    return schema

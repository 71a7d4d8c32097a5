"""Schemas of clients: what is too large, what cannot be followed, what is kept."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from octavo.errors import ConfigError
from octavo.serving.server import guidance
from octavo.serving.server.api_error import ApiError
from octavo.serving.server.guidance import GrammarCache, check_size
from octavo.serving.server.schema import Tool
from octavo.serving.server.workers import LARGE, WorkerError


class InProcess:
    """Workers whose tasks run here; the next one fails with `error`."""

    def __init__(self, make):
        self.made = SimpleNamespace(make_grammar=make)
        self.num_tasks, self.error, self.sizes = 0, None, []

    async def run(self, task, *args, limit_s, size):
        self.num_tasks += 1
        self.sizes.append(size)
        if self.error is not None:
            raise self.error
        return task(self.made, *args)


def make(schema):
    if schema.get("type") == "impossible":
        raise ConfigError("expected a type of JSON")
    if schema.get("type") == "endless":
        raise RecursionError
    return object()


def cache():
    workers = InProcess(make)
    return GrammarCache(make, workers), workers


def get(grammars, schema):
    return asyncio.run(grammars.get(schema, "response_format"))


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        (nested(200), "100 levels"),
        (nested(20_000), "100 levels"),
        ({"const": "x" * 10**6}, "131,072 characters"),
        ({"enum": list(range(10**5))}, "131,072 characters"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "1,000 properties"),
        ({"anyOf": [{"properties": {f"p{i}": {} for i in range(501)}}] * 2}, "1,000 properties"),
    ],
)
def test_what_is_too_large(schema, what):
    with pytest.raises(ApiError, match=what) as caught:
        check_size(schema, "tools")
    error = caught.value
    assert (error.status, error.param, error.code) == (400, "tools", "schema_too_large")


def tool(name, parameters):
    function = {"name": name, "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


def test_tools_are_measured_together():
    grammars, _ = cache()
    parameters = {"properties": {f"p{i}": {} for i in range(750)}}
    tools = (tool("a", parameters), tool("b", parameters))
    assert get(grammars, tools[:1]) is not None
    with pytest.raises(ApiError, match="1,000 properties"):
        get(grammars, tools)


def test_a_tool_and_a_schema_are_different_things():
    grammars, _ = cache()
    parameters = {"properties": {"a": {}}}
    assert get(grammars, (tool("a", parameters),)) is not get(grammars, {"a": parameters})


def test_grammars_are_kept_the_last_used_ones(monkeypatch):
    monkeypatch.setattr(guidance, "NUM_KEPT", 2)
    grammars, workers = cache()
    first = get(grammars, {"const": 1})
    assert get(grammars, {"const": 1}) is first
    assert workers.num_tasks == 1
    get(grammars, {"const": 2})
    get(grammars, {"const": 1})
    get(grammars, {"const": 3})  # 2 goes
    assert get(grammars, {"const": 1}) is first
    assert workers.num_tasks == 3
    get(grammars, {"const": 2})
    assert workers.num_tasks == 4


def test_the_order_of_properties_makes_another_grammar():
    grammars, _ = cache()
    one = {"properties": {"a": {}, "b": {}}}
    other = {"properties": {"b": {}, "a": {}}}
    assert get(grammars, one) is not get(grammars, other)


@pytest.mark.parametrize(
    ("kind", "reason"), [("impossible", "a type of JSON"), ("endless", "RecursionError")]
)
def test_refusals_are_kept_too(kind, reason):
    grammars, workers = cache()
    for _ in range(2):
        with pytest.raises(ApiError, match=reason) as caught:
            get(grammars, {"type": kind})
        assert (caught.value.status, caught.value.param) == (400, "response_format")
    assert workers.num_tasks == 1


def test_what_took_too_long_is_tried_again_later(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(guidance.time, "monotonic", lambda: now[0])
    grammars, workers = cache()
    workers.error = WorkerError("it took longer than 5 s")
    for _ in range(2):
        with pytest.raises(ApiError, match="longer than 5 s"):
            get(grammars, {"const": 1})
    assert workers.num_tasks == 1
    now[0] += guidance.RETRY_S
    workers.error = None
    assert get(grammars, {"const": 1}) is not None


def test_large_schemas_go_where_they_do_not_hold_up_small_ones():
    grammars, workers = cache()
    get(grammars, {"const": "x" * 10_000})
    get(grammars, {"const": "x"})
    assert workers.sizes[0] > LARGE > workers.sizes[1]

"""Answers drawn by a model's sampling parameters, by the engine here or by a server; their file.

The file has what each row said to each question, and whether it was right: JSON Lines, appended as
answers come, with the lock and the care of records (measure/store.py), so that more than one run
may write to it. A run that is resumed takes the answers that are there already; their keys say by
what they were made.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, OctavoError
from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens
from octavo.measure import store
from octavo.measure.bench.engine import Subject, open_engine
from octavo.measure.evaluate.answering import stop_tokens
from octavo.measure.evaluate.language import Client, Reply, machine_of, model_about
from octavo.measure.evaluate.task_data import Item
from octavo.measure.records import Machine, Scalar
from octavo.measure.rows import Row
from octavo.measure.run import Participant, ready
from octavo.recipe import Recipe
from octavo.serving.engine.engine import Engine
from octavo.serving.engine.request import Delta, Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How answers are drawn.

    options: by the names of OpenAI's and vLLM's APIs, such as temperature; what a server is not
    told, it chooses. max_tokens: None is all that the context has room for. seed: every item has
    its own by it, the same one for all rows.
    """

    options: Mapping[str, float]
    max_tokens: int | None = None
    seed: int = 0

    def seed_of(self, item: Item) -> int:
        """The seed of an item; 32 bits of it, which every server takes."""
        text = f"{self.seed}, {item.question}, {item.repetition}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        limit: Scalar = self.max_tokens or "context"
        return {**self.options, "max_tokens": limit, "seed": self.seed}


OnReply = Callable[[Item, Reply], None]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws a row's answers; it takes memory and connections only while it is asked.

    identity: all that its answers depend on besides item and plan.
    """

    name: str
    plan: SamplingPlan
    identity: str = field(repr=False)
    ask: Callable[[Sequence[Item], OnReply], None] = field(repr=False)

    def key(self, item: Item) -> str:
        """A name for this row's answer to this item; another one if anything is different."""
        plan = self.plan
        parts: list[Any] = [self.identity, [dict(m) for m in item.messages], dict(plan.options)]
        parts += [plan.max_tokens, plan.seed_of(item)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def server_sampler(client: Client, plan: SamplingPlan) -> Participant[Sampler]:
    """A server that answers chats; the machine of a record is the one that asked."""
    sampler = Sampler(
        name=client.name,
        plan=plan,
        identity=json.dumps([client.url, client.model]),
        ask=partial(_ask_server, client, plan),
    )
    return Participant(
        name=client.name,
        impl="http",
        about={"model": client.model, "url": client.url},
        machine=Machine.current(),
        open=ready(sampler),
    )


def _ask_server(
    client: Client, plan: SamplingPlan, items: Sequence[Item], on_reply: OnReply
) -> None:
    limit = {} if plan.max_tokens is None else {"max_tokens": plan.max_tokens}
    asked = [
        (item.messages, {**plan.options, "seed": plan.seed_of(item), **limit}) for item in items
    ]
    with client:
        client.reply_all(asked, lambda place, reply: on_reply(items[place], reply))


def engine_sampler(
    text_model: TextModel,
    row: Row,
    plan: SamplingPlan,
    settings: EngineSettings,
    *,
    scales: str | None = None,
) -> Participant[Sampler]:
    """A local model with a recipe, in an engine of its own.

    scales: where the recipe's came from, if that tells them: calibrated again, a last bit of them
    may differ, and answers of before are still the row's.
    """
    recipe = row.recipe() or Recipe()
    settled = json.loads(recipe.to_json()) | ({} if scales is None else {"scales": scales})
    prompts = text_model.prompts.about
    identity = [text_model.name, text_model.dtype, settled, *([prompts] if prompts else [])]
    own = Row.of(row.name, recipe)
    sampler = Sampler(
        name=row.name,
        plan=plan,
        identity=json.dumps(identity, sort_keys=True),
        ask=partial(_ask_engine, text_model, own, plan, settings),
    )
    return Participant(
        name=row.name,
        impl="engine",
        about=model_about(text_model),
        machine=machine_of(text_model.model),
        open=ready(sampler),
    )


def _ask_engine(
    text_model: TextModel,
    row: Row,
    plan: SamplingPlan,
    settings: EngineSettings,
    items: Sequence[Item],
    on_reply: OnReply,
) -> None:
    tokenizer, stop = text_model.tokenizer, tuple(sorted(stop_tokens(text_model)))
    with open_engine(Subject(text_model.model, {}, is_random=False), row, settings) as engine:
        requests = []
        for place, item in enumerate(items):
            prompt = chat_tokens(tokenizer, item.messages)
            room = engine.max_context - len(prompt)
            if room < (plan.max_tokens or 1):
                raise ConfigError(
                    f"question {item.question}: expected room for {plan.max_tokens or 1} tokens "
                    f"after a prompt of {len(prompt)}, got a context of {engine.max_context}: "
                    "lower --max-tokens"
                )
            options: dict[str, Any] = {**plan.options, "seed": plan.seed_of(item)}
            sampling = Sampling(**options, max_tokens=plan.max_tokens or room, stop_token_ids=stop)
            requests.append(Request(request_id=str(place), prompt=prompt, sampling=sampling))
        for request in requests:  # before any of them runs
            engine.check(request)
        for name, deltas in _run(engine, requests):
            found = gather(deltas)
            text = tokenizer.decode(found.tokens, skip_special_tokens=True)
            is_cut = found.finish_reason == "length"
            on_reply(items[int(name)], Reply(str(text), is_cut, len(found.tokens)))


def _run(engine: Engine, requests: list[Request]) -> Iterator[tuple[str, list[Delta]]]:
    """Every request with all of its deltas, as soon as it has ended; the queue is never full."""
    waiting = list(reversed(requests))
    deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
    while waiting or engine.has_work:
        while waiting and engine.stats().num_waiting < engine.settings.max_queue:
            engine.add(waiting.pop())
        for delta in engine.step():
            if delta.finish_reason == "error":
                raise OctavoError(f"an answer failed: {delta.error}")
            deltas[delta.request_id].append(delta)
            if delta.finish_reason is not None:
                yield delta.request_id, deltas.pop(delta.request_id)


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """A reply, what was read of it, and whether that is the true answer."""

    key: str
    row: str
    question: str
    repetition: int
    answer: str
    found: str | None
    is_right: bool
    reply: Reply


class AnswerFile:
    """Answers of a run; path: None keeps none. is_resumed: whether those in it are used again."""

    def __init__(self, path: Path | None = None, *, is_resumed: bool = False) -> None:
        self._path = path
        self._replies: dict[str, Reply] = {}
        if path is None:
            if is_resumed:
                raise ConfigError("--resume goes on with the file of --answers, which is not given")
            return
        store.check_folder(path)
        if not path.exists():
            return
        if not is_resumed:
            raise ConfigError(f"{path} is there already: add --resume to go on with it")
        self._replies = dict(store.read_lines(path, ANSWERS))

    def reply(self, key: str) -> Reply | None:
        """The reply of before with this key."""
        return self._replies.get(key)

    def append(self, answer: StoredAnswer) -> None:
        """Write an answer at the end of the file; it is on disk when this returns."""
        if self._path is None:
            return
        fields: dict[str, Any] = {**vars(answer), **vars(answer.reply)}
        del fields["reply"]
        store.append_lines(self._path, [json.dumps(fields)], ANSWERS)


def _parse(line: str) -> tuple[str, Reply]:
    """The key and the reply of one line."""
    try:
        row = json.loads(line)
        key, text, is_cut, tokens = (row[name] for name in ("key", "text", "is_cut", "num_tokens"))
    except (LookupError, TypeError, ValueError):
        raise CheckpointError(f"expected an answer, got {brief(line)}") from None
    return str(key), Reply(str(text), bool(is_cut), tokens)


ANSWERS = store.RowFormat(_parse, start=b'{"key": ')

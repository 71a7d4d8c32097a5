"""Answers drawn by a model's sampling parameters: by the engine here, or by a server."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError, OctavoError
from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens
from octavo.measure import rows
from octavo.measure.bench.engine import Subject, open_engine
from octavo.measure.evaluate.answering import stop_tokens
from octavo.measure.evaluate.endpoint import Client, Endpoint, Message, Reply
from octavo.measure.evaluate.perplexity import machine_of
from octavo.measure.evaluate.perplexity_rows import RecipeRow
from octavo.measure.records import Machine, Scalar
from octavo.recipe import Recipe
from octavo.serving.engine.engine import Engine
from octavo.serving.engine.request import Delta, Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings


@dataclass(frozen=True, eq=False)
class Item:
    """A question as it is asked once: which repetition it is, and the true answer.

    letters: of the options, if there are some.
    """

    question: str
    repetition: int
    messages: tuple[Message, ...] = field(repr=False)
    answer: str
    letters: str = ""


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

    @property
    def is_greedy(self) -> bool:
        """Whether all repetitions of a prompt are one answer."""
        return self.options.get("temperature") == 0

    def seed_of(self, item: Item) -> int:
        """The seed of an item; 32 bits of it, which every server takes."""
        text = f"{self.seed}, {item.question}, {item.repetition}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        limit: Scalar = self.max_tokens or "context"
        return {**self.options, "max_tokens": limit, "seed": self.seed}


OnReply = Callable[[Item, Reply], None]
Ask = Callable[[Sequence[Item], OnReply], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: who answers, from when `answer` is entered until it is left.

    identity: all that its answers depend on besides item and plan.
    """

    name: str
    impl: str
    about: Mapping[str, Scalar]
    machine: Machine
    identity: str = field(repr=False)
    answer: Callable[[], AbstractContextManager[Ask]] = field(repr=False)

    def key(self, item: Item, plan: SamplingPlan) -> str:
        """A name for this row's answer to this item; another one if anything is different."""
        parts: list[Any] = [self.identity, [dict(m) for m in item.messages], dict(plan.options)]
        parts += [plan.max_tokens, plan.seed_of(item)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def engine_row(
    text_model: TextModel,
    row: RecipeRow,
    plan: SamplingPlan,
    settings: EngineSettings,
    *,
    scales: str | None = None,
) -> Row:
    """A local model with a recipe, in an engine of its own.

    scales: where the recipe's came from, if that tells them: calibrated again, a last bit of them
    may differ, and answers of before are still the row's.
    """
    recipe = Recipe() if row.recipe is None else row.recipe
    settled = json.loads(recipe.to_json()) | ({} if scales is None else {"scales": scales})
    prompts = text_model.prompts.about
    identity = [text_model.name, text_model.dtype, settled, *([prompts] if prompts else [])]
    subject = Subject(text_model.model, {}, is_random=False)
    stop = tuple(sorted(stop_tokens(text_model)))

    @contextmanager
    def answer() -> Iterator[Ask]:
        with open_engine(subject, rows.Row.of(row.name, recipe), settings) as engine:

            def ask(items: Sequence[Item], on_reply: OnReply) -> None:
                requests = {
                    str(i): _request(str(i), item, text_model, plan, engine, stop)
                    for i, item in enumerate(items)
                }
                for request in requests.values():  # before any of them runs
                    engine.check(request)
                for name, deltas in _run(engine, list(requests.values())):
                    found = gather(deltas)
                    text = text_model.tokenizer.decode(found.tokens, skip_special_tokens=True)
                    is_cut = found.finish_reason == "length"
                    on_reply(items[int(name)], Reply(str(text), is_cut, len(found.tokens)))

            yield ask

    return Row(
        name=row.name,
        impl="engine",
        about={"model": text_model.name, "dtype": text_model.dtype, **prompts},
        machine=machine_of(text_model),
        identity=json.dumps(identity, sort_keys=True),
        answer=answer,
    )


def _request(
    name: str,
    item: Item,
    text_model: TextModel,
    plan: SamplingPlan,
    engine: Engine,
    stop: tuple[int, ...],
) -> Request:
    prompt = chat_tokens(text_model.tokenizer, item.messages)
    room = engine.max_context - len(prompt)
    if room < (plan.max_tokens or 1):
        raise ConfigError(
            f"question {item.question}: expected room for {plan.max_tokens or 1} tokens after a "
            f"prompt of {len(prompt)}, got a context of {engine.max_context}: lower --max-tokens"
        )
    options: dict[str, Any] = dict(plan.options)
    return Request(
        request_id=name,
        prompt=prompt,
        sampling=Sampling(
            **options,
            max_tokens=plan.max_tokens or room,
            seed=plan.seed_of(item),
            stop_token_ids=stop,
        ),
    )


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


def endpoint_row(endpoint: Endpoint, model: str, plan: SamplingPlan) -> Row:
    """A server that answers chats; the machine of a record is the one that asked."""

    @contextmanager
    def answer() -> Iterator[Ask]:
        with Client(endpoint) as client:

            def ask_one(item: Item) -> Reply:
                options = {**plan.options, "seed": plan.seed_of(item)}
                if plan.max_tokens is not None:
                    options["max_tokens"] = plan.max_tokens
                return client.reply(item.messages, options)

            def ask(items: Sequence[Item], on_reply: OnReply) -> None:
                with ThreadPoolExecutor(endpoint.concurrency) as pool:
                    futures = {pool.submit(ask_one, item): item for item in items}
                    try:
                        for future in as_completed(futures):
                            on_reply(futures[future], future.result())
                    except BaseException:
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise

            yield ask

    return Row(
        name=endpoint.name,
        impl="http",
        about={"model": model, "url": endpoint.url},
        machine=Machine.current(),
        identity=json.dumps([endpoint.url, model]),
        answer=answer,
    )

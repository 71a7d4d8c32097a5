"""Answers that are drawn by a model's sampling parameters, by the engine here or by a server."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from octavo.errors import ConfigError, OctavoError
from octavo.integrations.transformers.text_model import (
    TextModel,
    generation_sampling,
    load_generation_sampling,
)
from octavo.integrations.transformers.tokenizer import chat_tokens
from octavo.measure.bench.engine import Subject, open_engine
from octavo.measure.evaluate.answering import Message, stop_tokens
from octavo.measure.evaluate.fp8_layers import layers_that_ran
from octavo.measure.evaluate.language import (
    Client,
    Reply,
    Scales,
    local_rows,
    machine_of,
    model_about,
    recipe_digest,
    served_row,
)
from octavo.measure.evaluate.requests import SampledRequest
from octavo.measure.records import Scalar
from octavo.measure.rows import Row
from octavo.measure.run import Participant, ready
from octavo.recipe import Recipe
from octavo.serving.engine.request import Delta, Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings


@dataclass(frozen=True, eq=False)
class Item:
    """A question as it is asked once, in its repetition, and the true answer.

    letters: of the options, if there are some. max_tokens: of its answer, if the plan has no limit.
    """

    question: str
    repetition: int
    messages: tuple[Message, ...] = field(repr=False)
    answer: str
    letters: str = ""
    max_tokens: int | None = None


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

    def limit_of(self, item: Item) -> int | None:
        """The tokens that an item's answer may have."""
        return self.max_tokens or item.max_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether repetitions would all be the same."""
        return self.options.get("temperature") == 0

    def about(self) -> dict[str, Scalar]:
        """What records say of it; where nobody says what to draw by, the server's defaults are."""
        limit: Scalar = self.max_tokens or "context"
        drawn: dict[str, Scalar] = dict(self.options) or {"sampling": "server"}
        return {**drawn, "max_tokens": limit, "seed": self.seed}


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
        parts += [plan.limit_of(item), plan.seed_of(item)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def served_sampler(client: Client, plan: SamplingPlan, **about: Scalar) -> Participant[Sampler]:
    """A server that answers chats."""

    def options(item: Item) -> dict[str, float]:
        limit = plan.limit_of(item)
        own = {**plan.options, "seed": plan.seed_of(item)}
        return own if limit is None else {**own, "max_tokens": limit}

    def ask(items: Sequence[Item], on_reply: OnReply) -> None:
        asked = [(item.messages, options(item)) for item in items]
        with client:
            client.reply_all(asked, lambda place, reply: on_reply(items[place], reply))

    identity = json.dumps([client.url, client.model])
    sampler = Sampler(name=client.name, plan=plan, identity=identity, ask=ask)
    return served_row(client, ready(sampler), **about)


def _ask_engine(
    text_model: TextModel,
    row: Row,
    plan: SamplingPlan,
    settings: EngineSettings,
    ran: dict[str, float],
    items: Sequence[Item],
    on_reply: OnReply,
) -> None:
    tokenizer, stop = text_model.tokenizer, tuple(sorted(stop_tokens(text_model)))
    with open_engine(Subject(text_model.model, {}, is_random=False), row, settings) as engine:
        ran.update(layers_that_ran(engine.precision.layers))
        requests = []
        for place, item in enumerate(items):
            prompt = chat_tokens(tokenizer, item.messages)
            room, limit = engine.max_context - len(prompt), plan.limit_of(item)
            if room < (limit or 1):
                raise ConfigError(
                    f"question {item.question}: expected room for {limit or 1} tokens "
                    f"after a prompt of {len(prompt)}, got a context of {engine.max_context}: "
                    "lower --max-tokens"
                )
            options: dict[str, Any] = {**plan.options, "seed": plan.seed_of(item)}
            sampling = Sampling(**options, max_tokens=limit or room, stop_token_ids=stop)
            requests.append(Request(request_id=str(place), prompt=prompt, sampling=sampling))
        for request in requests:  # before any of them runs
            engine.check(request)
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
                    found = gather(deltas.pop(delta.request_id))
                    text = str(tokenizer.decode(found.tokens, skip_special_tokens=True))
                    reply = Reply(text, found.finish_reason == "length", len(found.tokens))
                    on_reply(items[int(delta.request_id)], reply)


def make_plan(
    request: SampledRequest, text_model: TextModel | None, *, may_repeat_greedily: bool = False
) -> tuple[SamplingPlan, int]:
    """How answers are drawn, and how often each question is asked.

    The model's own sampling parameters, and in their place what is set by hand; a server draws by
    its own where nothing is set. may_repeat_greedily: whether repetitions ask something else.
    """
    own: Mapping[str, float] = {}
    if text_model is not None:
        own = generation_sampling(getattr(text_model.model, "generation_config", None))
    if request.generation_config is not None:
        own = load_generation_sampling(request.generation_config)
    plan = SamplingPlan(
        options={**own, **request.sampling}, max_tokens=request.max_tokens, seed=request.seed
    )
    if not plan.is_greedy or may_repeat_greedily:
        return plan, request.repetitions or request.usual_repetitions
    if (request.repetitions or 1) > 1:
        raise ConfigError(
            f"expected sampling for {request.repetitions} repetitions, got greedy decoding, which "
            "repeats itself: set --temperature, or --repetitions 1"
        )
    return plan, 1


def local_samplers(
    request: SampledRequest, text_model: TextModel, plan: SamplingPlan, scales: Scales
) -> list[Participant[Sampler]]:
    """The request's rows of a local model, in the engine."""
    num_seqs = request.max_concurrency
    engine = EngineSettings(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(EngineSettings().max_num_batched_tokens, num_seqs),
        memory_fraction=request.gpu_memory_utilization,
        num_pages=request.num_pages,
    )
    rows = []
    for asked, row in local_rows(request, text_model, scales):
        recipe = row.recipe() or Recipe()
        settled = json.loads(recipe.to_json())
        calibration, ran = None, dict[str, float]()
        if request.scales is None and asked.needs_scales:
            # Calibrated again, a last bit may differ: answers of before are still the row's.
            calibration = f"calibrated on generated chats, margin {request.margin:g}"
            settled["scales"] = calibration
        prompts = text_model.prompts.about
        identity = [text_model.name, text_model.dtype, settled, *([prompts] if prompts else [])]
        sampler = Sampler(
            name=row.name,
            plan=plan,
            identity=json.dumps(identity, sort_keys=True),
            ask=partial(_ask_engine, text_model, Row.of(row.name, recipe), plan, engine, ran),
        )
        about = model_about(text_model)
        if (digest := recipe_digest(row.recipe(), calibration)) is not None:
            about["recipe_digest"] = digest
        machine = machine_of(text_model.model)
        found = Participant(
            name=row.name,
            impl="engine",
            about=about,
            machine=machine,
            open=ready(sampler),
            ran=ran,
        )
        rows.append(found)
    return rows

"""Requests as the engine takes them, from requests as clients write them."""

import asyncio
import logging
import math
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from octavo.errors import ConfigError, OctavoError
from octavo.serving.engine.request import Request, Sampling
from octavo.serving.server.answers import (
    CLOSING,
    AnswerKind,
    AnyCallReader,
    AutoCallReader,
    ChatChoice,
    Choice,
    MessageReader,
    NamedCallReader,
    TextChoice,
    TokenTexts,
    Writer,
)
from octavo.serving.server.api_error import bad_request
from octavo.serving.server.async_engine import Engine
from octavo.serving.server.bare_app import ServedModels
from octavo.serving.server.guidance import (
    GrammarCache,
    MakeGrammar,
    Schema,
    WorkerSetUp,
    call_prompts,
    check_size,
    forced_tools,
    format_schema,
)
from octavo.serving.server.input_images import ImageReader
from octavo.serving.server.prompts import (
    Prompts,
    chat_size,
    image_urls,
    listed_prompts,
    num_chars,
)
from octavo.serving.server.schema import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    TokenizeRequest,
    Tool,
)
from octavo.serving.server.settings import ServerSettings
from octavo.serving.server.workers import LARGE, WorkerError, Workers

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
NUM_WORKERS = 2
ENCODE_S = 60.0
MAX_ECHO_CHARS = 4 * 2**20
# Fields whose names and values are Sampling's own.
SAME_NAMES = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "ignore_eos", "min_tokens"),
)


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine, and how the answer is written.

    requests: one for each choice, in the order of their index.
    """

    requests: tuple[Request, ...]
    writer: Writer
    is_stream: bool
    has_usage_chunk: bool

    @property
    def is_small(self) -> bool:
        """Whether the whole answer is written in no time; thousands of logprobs take a second."""
        return len(self.requests) < 8 and self.requests[0].sampling.logprobs is None


class Jobs:
    """Makes jobs; slow work (templates, tokens, images, grammars) stays off the event loop.

    Short prompts are encoded in a thread, within milliseconds; long ones, and grammars, in worker
    processes, which are killed if the client leaves.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        make_grammar: MakeGrammar,
        models: ServedModels,
    ) -> None:
        self._models = models
        self._settings = settings
        self._max_context = engine.max_context
        self._engine = engine  # only what any thread may call
        self.images = ImageReader(engine, settings.images)
        self._prompts = Prompts(engine.tokenizer, engine.max_context)
        self.token_texts = TokenTexts(engine.tokenizer)
        # One thread: a tokenizer is not to be used by two.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="octavo-tokenizer")
        set_up = WorkerSetUp(engine.tokenizer, engine.max_context, make_grammar)
        self._workers = Workers(NUM_WORKERS, set_up, preload=type(engine.tokenizer).__module__)
        self._make_grammar = make_grammar
        self._grammars = GrammarCache(make_grammar, self._workers)

    @property
    def most_body_bytes(self) -> float:
        """The largest body that can be of use: a text that fits the context, all of it escaped."""
        if self._engine.has_images:
            return math.inf
        return 6 * self._prompts.max_chars + 2**20

    def warm_up(self) -> None:
        """Do now what the first long prompt and the first grammar would wait for."""
        self._workers.start()
        try:
            self._make_grammar({"type": "object"})
        except OctavoError as error:
            logger.warning("guided answers are not available: %s", error)

    def close(self) -> None:
        """End the threads of the tokenizer and of images, and the worker processes."""
        self.images.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._workers.close()
        self._grammars.close()

    async def chat(self, body: ChatRequest, at_end: ExitStack) -> Job:
        """The job of a chat completion; at_end: what is to be done when its request has ended."""
        self._models.check(body.model)
        forced = forced_tools(body)
        schema: Schema | tuple[Tool, ...] | None = format_schema(body.response_format)
        if schema is not None and body.tools and body.tool_choice != "none":
            raise bad_request(
                f"response_format {body.response_format and body.response_format.type!r} together "
                "with tools is not supported: set tool_choice to 'none' or leave one out",
                "response_format",
            )
        schema, param = (forced, "tools") if forced else (schema, "response_format")
        check_size(schema, param)  # first: tools are part of the prompt, too
        files = await self.images.check(image_urls(body.messages))
        tools = [] if body.tool_choice == "none" else body.tools or []
        is_auto = bool(tools) and not forced  # an answer that may make one call ends behind it
        prompt = await self._chat_tokens(body.messages, tools, is_forced=bool(forced))
        prepared: Any = ()
        if files:
            prepared = await self.images.prepare(prompt, files, at_end)
            prompt = prepared.tokens
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        max_tokens = self._max_tokens(
            _asked_tokens(body), len(prompt), self._max_context, "messages"
        )
        sampling = await self._sampling(
            body,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            schema=schema,
            param=param,
            more_stops=(CLOSING,) if is_auto and body.parallel_tool_calls is False else (),
        )
        requests = _requests("chatcmpl", body, [(prompt, max_tokens)], sampling, prepared)
        choices = [ChatChoice(self.token_texts, _reader(body, len(forced))) for _ in requests]
        return self._job(body, "chat.completion", requests, choices)

    async def completion(self, body: CompletionRequest) -> Job:
        """The job of a completion."""
        self._models.check(body.model)
        given = listed_prompts(body)
        _check_choices(body, len(given))
        schema = format_schema(body.response_format)
        for one in given:
            self._prompts.check_length(len(one), "prompt")
        prompts, echoes = [], []
        for one in given:
            tokens = await self._encoded("of_completion", len(one), one)
            most = self._max_tokens(
                body.max_tokens, len(tokens), DEFAULT_COMPLETION_TOKENS, "prompt"
            )
            prompts.append((tokens, most))
            echo = ""
            if body.echo and isinstance(one, str):
                echo = one
            elif body.echo:
                echo = await self._encoded("decode", len(tokens), tokens)
            echoes += [echo] * (body.n or 1)
        if sum(map(len, echoes)) > MAX_ECHO_CHARS:
            message = f"the prompt, once for each choice, exceeds {MAX_ECHO_CHARS:,} characters"
            raise bad_request(f"echo: {message}", "echo")
        sampling = await self._sampling(
            body,
            max_tokens=prompts[0][1],
            logprobs=body.logprobs,
            schema=schema,
            param="response_format",
        )
        requests = _requests("cmpl", body, prompts, sampling)
        choices = [TextChoice(self.token_texts, echo) for echo in echoes]
        return self._job(body, "text_completion", requests, choices)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a prompt or of a conversation."""
        self._models.check(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("expected either prompt or messages, got both or neither")
        if body.messages is not None:
            is_open = body.add_generation_prompt
            tokens = await self._chat_tokens(
                body.messages, body.tools or [], add_generation_prompt=is_open
            )
        else:
            prompt = body.prompt or ""
            self._prompts.check_length(len(prompt), "prompt")
            options = {"param": "prompt", "add_special_tokens": body.add_special_tokens}
            tokens = await self._encoded("encode", len(prompt), prompt, **options)
        return {"count": len(tokens), "max_model_len": self._max_context, "tokens": list(tokens)}

    async def detokenize(self, tokens: list[int]) -> dict[str, Any]:
        """The text of tokens."""
        return {"prompt": await self._encoded("decode", len(tokens), tokens)}

    async def _chat_tokens(
        self, messages: Sequence[Message], tools: Sequence[Tool], **options: bool
    ) -> tuple[int, ...]:
        """The tokens of a conversation; options: of `Prompts.of_chat`."""
        self._prompts.check_length(num_chars(messages), "messages")
        size = chat_size(messages, tools)
        tokens: tuple[int, ...] = await self._encoded("of_chat", size, messages, tools, **options)
        return tokens

    def _job(
        self,
        body: SamplingFields,
        kind: AnswerKind,
        requests: Sequence[Request],
        choices: Sequence[Choice],
    ) -> Job:
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        name = body.model or self._models.names[0]
        by_id = {one.request_id: choice for one, choice in zip(requests, choices, strict=True)}
        writer = Writer(requests[0].request_id, kind, name, by_id, body.n or 1)
        return Job(tuple(requests), writer, is_stream=bool(body.stream), has_usage_chunk=has_usage)

    async def _sampling(
        self,
        body: SamplingFields,
        *,
        max_tokens: int,
        logprobs: int | None,
        schema: Schema | tuple[Tool, ...] | None,
        param: str,
        more_stops: tuple[str, ...] = (),
    ) -> Sampling:
        grammar = None if schema is None else await self._grammars.get(schema, param)
        given = {name: value for name in SAME_NAMES if (value := getattr(body, name)) is not None}
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        try:
            return Sampling(
                max_tokens=max_tokens,
                logprobs=logprobs,
                top_k=max(body.top_k or 0, 0),  # vLLM writes -1 for all
                logit_bias=tuple(
                    (int(token), bias) for token, bias in (body.logit_bias or {}).items()
                ),
                stop=(*stop, *more_stops),
                stop_token_ids=tuple(body.stop_token_ids or ()),
                grammar=grammar,
                **given,
            )
        except ConfigError as error:
            raise bad_request(str(error)) from None

    def _max_tokens(
        self, asked: int | None, num_prompt: int, default: int, prompt_param: str
    ) -> int:
        room = self._max_context - num_prompt
        if room < 1 or (asked or 1) > room:
            # litellm recognises OpenAI's first words, and may try a model with a longer context.
            raise bad_request(
                f"This model's maximum context length is {self._max_context} tokens: prompt "
                f"({num_prompt} tokens) + max_tokens ({asked or 1}) exceeds it, ask for less",
                "max_tokens" if room >= 1 else prompt_param,
                "context_length_exceeded",
            )
        limit = self._settings.max_tokens
        if asked is not None and limit is not None and asked > limit:
            message = f"expected max_tokens of at most {limit}, which this server allows"
            raise bad_request(f"{message}; got {asked}", "max_tokens")
        return asked or min(default, room, limit or room)

    async def _encoded(self, method: str, size: int, /, *args: Any, **kwargs: Any) -> Any:
        """What a method of `Prompts` returns; size: about the characters that it looks at."""
        if size > LARGE:
            call = (call_prompts, method, args, kwargs)
            try:
                return await self._workers.run(*call, limit_s=ENCODE_S, size=size)
            except WorkerError as error:
                raise bad_request(f"the prompt could not be encoded: {error}") from None
        loop = asyncio.get_running_loop()
        function = partial(getattr(self._prompts, method), *args, **kwargs)
        return await loop.run_in_executor(self._executor, function)


def _asked_tokens(body: ChatRequest) -> int | None:
    asked = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(asked) > 1:
        raise bad_request("expected max_tokens or max_completion_tokens, got both", "max_tokens")
    return asked.pop() if asked else None


def _check_choices(body: CompletionRequest, num_prompts: int) -> None:
    n = body.n or 1
    if body.best_of not in (None, n):
        raise bad_request(
            f"best_of must equal n ({n}), since this server returns every answer that it makes; "
            f"got {body.best_of}",
            "best_of",
        )
    if num_prompts == 0:
        raise bad_request("expected one prompt or more, got an empty list", "prompt")
    if num_prompts * n > MAX_CHOICES:
        raise bad_request(
            f"{num_prompts} prompts with n = {n} ask for {num_prompts * n} choices; one request "
            f"may ask for {MAX_CHOICES} at most: split it",
            "prompt",
        )
    if body.echo and body.logprobs is not None:
        raise bad_request(
            "echo together with logprobs is not supported, since the log-probabilities of a "
            "prompt's tokens are not computed: leave one of them out",
            "echo",
        )


def _requests(
    kind: str,
    body: SamplingFields,
    prompts: Sequence[tuple[tuple[int, ...], int]],
    sampling: Sampling,
    images: Any = (),
) -> list[Request]:
    """A request for each choice, n for each prompt (its tokens, its max_tokens).

    Choice i of a prompt has the seed `seed + i`: choices differ, and come again with the seed.
    """
    first, requests = f"{kind}-{uuid.uuid4().hex}", list[Request]()
    try:
        for prompt, max_tokens in prompts:
            for i in range(body.n or 1):
                seed = None if body.seed is None else (body.seed + i + 2**63) % 2**64 - 2**63
                own = replace(sampling, max_tokens=max_tokens, seed=seed)
                name = f"{first}-{len(requests)}" if requests else first
                requests.append(
                    Request(request_id=name, prompt=prompt, sampling=own, images=images)
                )
    except ConfigError as error:
        raise bad_request(str(error)) from None
    return requests


def _reader(body: ChatRequest, num_forced: int) -> MessageReader:
    """How the answer's text is read: as content, as the call it was forced to be, or as both."""
    if not body.tools or body.tool_choice == "none":
        return MessageReader()
    if num_forced == 0:
        return AutoCallReader()
    if num_forced > 1:
        return AnyCallReader()
    # OpenAI says "stop" after a call that was asked for by name.
    (tool,) = forced_tools(body)
    return NamedCallReader(
        tool.function.name, "tool_calls" if body.tool_choice == "required" else "stop"
    )

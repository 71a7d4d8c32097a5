"""Requests as the engine takes them, from requests as clients write them."""

import asyncio
import math
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.errors import ConfigError
from octavo.serving.engine.request import Request, Sampling
from octavo.serving.server.answer_body import ChatWriter, CompletionWriter, TokenTexts, Writer
from octavo.serving.server.api_error import bad_request
from octavo.serving.server.async_engine import Engine
from octavo.serving.server.guidance import (
    GrammarCache,
    MakeGrammar,
    Schema,
    call_schema,
    forced_tools,
    format_schema,
)
from octavo.serving.server.image_reader import ImageReader
from octavo.serving.server.message_reader import (
    CLOSING,
    AnyCallReader,
    AutoCallReader,
    MessageReader,
    NamedCallReader,
    PlainReader,
)
from octavo.serving.server.prompts import Prompts, chat_size, image_urls, num_chars
from octavo.serving.server.schema import (
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    TokenizeRequest,
)
from octavo.serving.server.served_models import ServedModels
from octavo.serving.server.settings import ServerSettings
from octavo.serving.server.workers import WorkerError, Workers

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
NUM_WORKERS = 2
# Encoding takes about 1 ms for 1000 characters of a slow core.
LARGE_PROMPT_CHARS = 8 * 1024
ENCODE_S = 60.0
# Fields whose names and values are Sampling's own.
SAME_NAMES = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "ignore_eos", "min_tokens"),
)


@dataclass(frozen=True)
class Job:
    """A request for the engine, and how its answer is written."""

    request: Request
    writer: Writer
    is_stream: bool
    has_usage_chunk: bool


@dataclass(frozen=True)
class WorkerSetUp:
    """What a worker process works with, made from what pickle can take there."""

    tokenizer: Any
    max_context: int
    make_grammar: MakeGrammar

    def __call__(self) -> "WorkerTools":
        return WorkerTools(Prompts(self.tokenizer, self.max_context), self.make_grammar)


@dataclass(frozen=True)
class WorkerTools:
    """What tasks in a worker process use."""

    prompts: Prompts
    make_grammar: MakeGrammar


def call_prompts(tools: WorkerTools, method: str, args: Any, kwargs: Any) -> Any:
    """Call a method of `Prompts` in a worker process."""
    return getattr(tools.prompts, method)(*args, **kwargs)


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
        self._token_texts = TokenTexts(engine.tokenizer)
        # One thread: a tokenizer is not to be used by two.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="octavo-tokenizer")
        set_up = WorkerSetUp(engine.tokenizer, engine.max_context, make_grammar)
        self._workers = Workers(NUM_WORKERS, set_up)
        self._grammars = GrammarCache(make_grammar, self._workers)

    @property
    def most_body_bytes(self) -> float:
        """The largest body that can be of use: a text that fits the context, all of it escaped."""
        if self._engine.has_images:
            return math.inf
        return 6 * self._prompts.max_chars + 2**20

    def start_workers(self) -> None:
        """Start a worker process now; left out, the first long prompt waits for it."""
        self._workers.start()

    def close(self) -> None:
        """End the threads of the tokenizer and of images, and the worker processes."""
        self.images.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._workers.close()

    async def chat(self, body: ChatRequest, at_end: ExitStack) -> Job:
        """The job of a chat completion; at_end: what is to be done when its request has ended."""
        self._models.check(body.model)
        forced = forced_tools(body)
        schema, param = self._chat_schema(body, is_forced=bool(forced))
        files = await self.images.check(image_urls(body.messages))
        tools = [] if body.tool_choice == "none" else body.tools or []
        self._prompts.check_length(num_chars(body.messages), "messages")
        size = chat_size(body.messages, tools)
        prompt = await self._encoded("of_chat", size, body.messages, tools, is_forced=bool(forced))
        prepared: Any = ()
        if files:
            prepared = await self.images.prepare(prompt, files, at_end)
            prompt = prepared.tokens
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        sampling = await self._sampling(
            body,
            max_tokens=self._max_tokens(_asked_tokens(body), len(prompt), self._max_context),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            schema=schema,
            param=param,
            more_stops=_one_call_only(body, is_forced=bool(forced)),
        )
        writer = ChatWriter(
            request_id, self._name(body), self._token_texts, lambda: _reader(body, len(forced))
        )
        request = _request(request_id, prompt, sampling, prepared)
        return self._job(body, request, writer)

    async def completion(self, body: CompletionRequest) -> Job:
        """The job of a completion."""
        self._models.check(body.model)
        schema = format_schema(body.response_format)
        size = _prompt_size(body.prompt)
        self._prompts.check_length(size, "prompt")
        prompt = await self._encoded("of_completion", size, body)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        sampling = await self._sampling(
            body,
            max_tokens=self._max_tokens(body.max_tokens, len(prompt), DEFAULT_COMPLETION_TOKENS),
            logprobs=body.logprobs,
            schema=schema,
            param="response_format",
        )
        writer = CompletionWriter(request_id, self._name(body), self._token_texts)
        return self._job(body, _request(request_id, prompt, sampling), writer)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a prompt or of a conversation."""
        self._models.check(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("expected either prompt or messages, got both or neither")
        if body.messages is not None:
            tools = body.tools or []
            self._prompts.check_length(num_chars(body.messages), "messages")
            size = chat_size(body.messages, tools)
            tokens = await self._encoded(
                "of_chat",
                size,
                body.messages,
                tools,
                add_generation_prompt=body.add_generation_prompt,
            )
        else:
            prompt = body.prompt or ""
            self._prompts.check_length(len(prompt), "prompt")
            tokens = await self._encoded(
                "encode",
                len(prompt),
                prompt,
                param="prompt",
                add_special_tokens=body.add_special_tokens,
            )
        return {"count": len(tokens), "max_model_len": self._max_context, "tokens": list(tokens)}

    async def detokenize(self, tokens: list[int]) -> dict[str, Any]:
        """The text of tokens."""
        return {"prompt": await self._encoded("decode", len(tokens), tokens)}

    def _name(self, body: SamplingFields) -> str:
        return body.model or self._models.names[0]

    def _job(self, body: SamplingFields, request: Request, writer: Writer) -> Job:
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return Job(request, writer, is_stream=bool(body.stream), has_usage_chunk=has_usage)

    def _chat_schema(self, body: ChatRequest, *, is_forced: bool) -> tuple[Schema | None, str]:
        schema = format_schema(body.response_format)
        if schema is not None and body.tools and body.tool_choice != "none":
            raise bad_request(
                f"response_format {body.response_format and body.response_format.type!r} together "
                "with tools is not supported: set tool_choice to 'none' or leave one out",
                "response_format",
            )
        if is_forced:
            return call_schema(forced_tools(body)), "tools"
        return schema, "response_format"

    async def _sampling(
        self,
        body: SamplingFields,
        *,
        max_tokens: int,
        logprobs: int | None,
        schema: Schema | None,
        param: str,
        more_stops: tuple[str, ...] = (),
    ) -> Sampling:
        grammar = None
        if schema is not None:
            grammar = await self._grammars.get(schema, param)
        given = {name: value for name in SAME_NAMES if (value := getattr(body, name)) is not None}
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        try:
            return Sampling(
                max_tokens=max_tokens,
                logprobs=logprobs,
                top_k=max(body.top_k or 0, 0),  # vLLM writes -1 for all
                stop=(*stop, *more_stops),
                stop_token_ids=tuple(body.stop_token_ids or ()),
                grammar=grammar,
                **given,
            )
        except ConfigError as error:
            raise bad_request(str(error)) from None

    def _max_tokens(self, asked: int | None, num_prompt: int, default: int) -> int:
        room = self._max_context - num_prompt
        if room < 1 or (asked or 1) > room:
            raise bad_request(
                f"expected a prompt and its answer in {self._max_context} tokens, got "
                f"{num_prompt} and {asked or 1}: ask for less",
                "max_tokens" if room >= 1 else "messages",
                "context_length_exceeded",
            )
        limit = self._settings.max_tokens
        if asked is not None and limit is not None and asked > limit:
            message = f"expected max_tokens of at most {limit}, which this server allows"
            raise bad_request(f"{message}; got {asked}", "max_tokens")
        return asked or min(default, room, limit or room)

    async def _encoded(self, method: str, size: int, /, *args: Any, **kwargs: Any) -> Any:
        """What a method of `Prompts` returns; size: about the characters that it looks at."""
        if size > LARGE_PROMPT_CHARS:
            call = (call_prompts, method, args, kwargs)
            try:
                return await self._workers.run(*call, limit_s=ENCODE_S, is_large=True)
            except WorkerError as error:
                raise bad_request(f"the prompt could not be encoded: {error}") from None
        loop = asyncio.get_running_loop()
        function = partial(getattr(self._prompts, method), *args, **kwargs)
        return await loop.run_in_executor(self._executor, function)


def _prompt_size(prompt: Any) -> int:
    """The characters or tokens of a prompt, or of the largest of several."""
    is_several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return max(map(len, prompt)) if is_several else len(prompt)


def _asked_tokens(body: ChatRequest) -> int | None:
    asked = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(asked) > 1:
        raise bad_request("expected max_tokens or max_completion_tokens, got both", "max_tokens")
    return asked.pop() if asked else None


def _one_call_only(body: ChatRequest, *, is_forced: bool) -> tuple[str, ...]:
    """The text at which the answer ends if it may make one call and no more."""
    is_auto = bool(body.tools) and body.tool_choice != "none" and not is_forced
    return (CLOSING,) if is_auto and body.parallel_tool_calls is False else ()


def _request(
    request_id: str, prompt: tuple[int, ...], sampling: Sampling, images: Any = ()
) -> Request:
    try:
        return Request(request_id=request_id, prompt=prompt, sampling=sampling, images=images)
    except ConfigError as error:
        raise bad_request(str(error)) from None


def _reader(body: ChatRequest, num_forced: int) -> MessageReader:
    """How the answer's text is read: as content, as the call it was forced to be, or as both."""
    if not body.tools or body.tool_choice == "none":
        return PlainReader()
    if num_forced == 0:
        return AutoCallReader()
    if num_forced > 1:
        return AnyCallReader()
    # OpenAI says "stop" after a call that was asked for by name.
    (tool,) = forced_tools(body)
    return NamedCallReader(
        tool.function.name, "tool_calls" if body.tool_choice == "required" else "stop"
    )

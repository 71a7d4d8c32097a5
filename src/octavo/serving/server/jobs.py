"""Requests as the engine takes them, from requests as clients write them."""

import asyncio
import logging
import math
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from octavo.errors import ConfigError, OctavoError
from octavo.serving.engine.image_request import nth_seed
from octavo.serving.engine.request import Request, Sampling
from octavo.serving.server import answers, guidance
from octavo.serving.server.api_error import bad_request
from octavo.serving.server.input_images import ImageReader
from octavo.serving.server.prompts import Prompts, chat_size, image_urls, listed_prompts
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

if TYPE_CHECKING:
    from octavo.serving.engine.engine import Engine

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
ID_PREFIXES = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}
NUM_WORKERS = 2
ENCODE_S = 60.0
MAX_ECHO_CHARS = 4 * 2**20
# Fields whose names and values are Sampling's own; the others are converted.
SAME_NAMES = SamplingFields.model_fields.keys() & Sampling.__dataclass_fields__.keys()
SAME_NAMES -= {"max_tokens", "top_k", "logit_bias", "stop", "stop_token_ids"}


class Jobs:
    """Makes jobs; slow work (templates, tokens, images, grammars) stays off the event loop.

    Short prompts are encoded in a thread, within milliseconds; long ones, and grammars, in worker
    processes, which are killed if the client leaves. model_name: of answers to requests that name
    no model.
    """

    def __init__(
        self,
        engine: "Engine",
        settings: ServerSettings,
        make_grammar: guidance.MakeGrammar,
        model_name: str,
    ) -> None:
        self._settings, self._model_name = settings, model_name
        self._max_context = engine.max_context
        self._engine = engine  # only what any thread may call
        self.images = ImageReader(engine, settings.images)
        self._prompts = Prompts(engine.tokenizer, engine.max_context)
        self.text_of = answers.token_texts(engine.tokenizer)
        # One thread: a tokenizer is not to be used by two.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="octavo-tokenizer")
        set_up = partial(guidance.WorkerTools, engine.tokenizer, engine.max_context, make_grammar)
        self._workers = Workers(NUM_WORKERS, set_up, preload=type(engine.tokenizer).__module__)
        self._make_grammar = make_grammar
        self._grammars = guidance.GrammarCache(make_grammar, self._workers)

    @property
    def most_body_bytes(self) -> float:
        """The largest body that can be of use: a text that fits the context, all of it escaped."""
        return math.inf if self._engine.has_images else 6 * self._prompts.max_chars + 2**20

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

    async def make(self, body: ChatRequest | CompletionRequest, at_end: ExitStack) -> answers.Job:
        """The job of a request; at_end: what is to be done when the request has ended."""
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        if isinstance(body, ChatRequest):
            return await self._chat(body, at_end)
        return await self._completion(body)

    async def _chat(self, body: ChatRequest, at_end: ExitStack) -> answers.Job:
        forced, schema = guidance.forced_tools(body), guidance.format_schema(body.response_format)
        if schema is not None and body.tools and body.tool_choice != "none":
            raise bad_request(
                f"response_format {body.response_format and body.response_format.type!r} together "
                "with tools is not supported: set tool_choice to 'none' or leave one out",
                "response_format",
            )
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if len({body.max_tokens, body.max_completion_tokens} - {None}) > 1:
            message = "expected max_tokens or max_completion_tokens, got both"
            raise bad_request(message, "max_tokens")
        followed: guidance.Followed | None = forced or schema
        param = "tools" if forced else "response_format"
        if followed is not None:
            guidance.check_size(followed, param)  # first: tools are part of the prompt, too
        files = await self.images.check(image_urls(body.messages))
        tools = [] if body.tool_choice == "none" else body.tools or []
        prompt = await self._chat_tokens(body.messages, tools, is_forced=bool(forced))
        images: Any = ()
        if files:
            images = await self.images.prepare(prompt, files, at_end)
            prompt = images.tokens
        asked = body.max_tokens or body.max_completion_tokens
        max_tokens = self._max_tokens(asked, len(prompt), self._max_context, "messages")
        # An answer that may make one call ends behind it.
        is_one = bool(tools) and not forced and body.parallel_tool_calls is False
        own = {
            "grammar": None if followed is None else await self._grammars.get(followed, param),
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
        choices = [
            answers.ChatChoice(self.text_of, _reader(body, forced)) for _ in range(body.n or 1)
        ]
        prompts, stop = [(prompt, max_tokens)], (answers.CLOSING,) if is_one else ()
        return self._job("chat.completion", body, prompts, own, choices, stop, images)

    async def _completion(self, body: CompletionRequest) -> answers.Job:
        given, n = listed_prompts(body), body.n or 1
        if body.best_of not in (None, n):
            raise bad_request(
                f"best_of must equal n ({n}), since this server returns every answer that it "
                f"makes; got {body.best_of}",
                "best_of",
            )
        if not given:
            raise bad_request("expected one prompt or more, got an empty list", "prompt")
        if (num_choices := len(given) * n) > MAX_CHOICES:
            raise bad_request(
                f"{len(given)} prompts with n = {n} ask for {num_choices} choices; one request "
                f"may ask for {MAX_CHOICES} at most: split it",
                "prompt",
            )
        if body.echo and body.logprobs is not None:
            raise bad_request(
                "echo together with logprobs is not supported, since the log-probabilities of a "
                "prompt's tokens are not computed: leave one of them out",
                "echo",
            )
        schema = guidance.format_schema(body.response_format)
        for one in given:
            self._prompts.check_length(len(one), "prompt")
        prompts, echoes = [], []
        for one in given:
            tokens = await self._encoded(len(one), Prompts.of_completion, one)
            most = self._max_tokens(
                body.max_tokens, len(tokens), DEFAULT_COMPLETION_TOKENS, "prompt"
            )
            prompts.append((tokens, most))
            echo = one if body.echo else ""
            if not isinstance(echo, str):
                echo = await self._encoded(len(tokens), Prompts.decode, tokens)
            echoes += [echo] * n
        if sum(map(len, echoes)) > MAX_ECHO_CHARS:
            message = f"the prompt, once for each choice, exceeds {MAX_ECHO_CHARS:,} characters"
            raise bad_request(f"echo: {message}", "echo")
        own: dict[str, Any] = {"logprobs": body.logprobs}
        if schema is not None:
            own["grammar"] = await self._grammars.get(schema, "response_format")
        choices = [answers.TextChoice(self.text_of, echo) for echo in echoes]
        return self._job("text_completion", body, prompts, own, choices)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a prompt or of a conversation."""
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
            tokens = await self._encoded(len(prompt), Prompts.encode, prompt, **options)
        return {"count": len(tokens), "max_model_len": self._max_context, "tokens": list(tokens)}

    async def detokenize(self, tokens: list[int]) -> dict[str, Any]:
        """The text of tokens."""
        return {"prompt": await self._encoded(len(tokens), Prompts.decode, tokens)}

    async def _chat_tokens(
        self, messages: Sequence[Message], tools: Sequence[Tool], **options: bool
    ) -> tuple[int, ...]:
        """The tokens of a conversation; options: of `Prompts.of_chat`."""
        # A prompt has these characters at least; templates may shorten what assistants said.
        num_chars = sum(message.num_chars for message in messages if message.role != "assistant")
        self._prompts.check_length(num_chars, "messages")
        size = chat_size(messages, tools)
        made = self._encoded(size, Prompts.of_chat, messages, tools, **options)
        return cast("tuple[int, ...]", await made)

    def _job(
        self,
        kind: answers.AnswerKind,
        body: SamplingFields,
        prompts: Sequence[tuple[tuple[int, ...], int]],
        own: dict[str, Any],
        choices: Sequence[answers.ChatChoice | answers.TextChoice],
        more_stops: tuple[str, ...] = (),
        images: Any = (),
    ) -> answers.Job:
        """The job of n requests for each prompt (its tokens, its max_tokens), one for each choice.

        own: fields of Sampling that only this kind of request has. Choice i of a prompt has the
        seed `seed + i`: choices differ, and come again with the seed.
        """
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        biases = (body.logit_bias or {}).items()
        shared = {
            **body.model_dump(include=SAME_NAMES, exclude_none=True),
            "top_k": max(body.top_k or 0, 0),  # vLLM writes -1 for all
            "logit_bias": tuple((int(token), bias) for token, bias in biases),
            "stop": (*stop, *more_stops),
            "stop_token_ids": tuple(body.stop_token_ids or ()),
        }
        first, requests = f"{ID_PREFIXES[kind]}-{uuid.uuid4().hex}", list[Request]()
        for (prompt, max_tokens), i in product(prompts, range(body.n or 1)):
            seed = None if body.seed is None else nth_seed(body.seed, i)
            name = f"{first}-{len(requests)}" if requests else first
            try:
                sampling = Sampling(**shared | own | {"max_tokens": max_tokens, "seed": seed})
                one = Request(request_id=name, prompt=prompt, sampling=sampling, images=images)
            except ConfigError as error:
                raise bad_request(str(error)) from None
            requests.append(one)
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        model, n = body.model or self._model_name, body.n or 1
        return answers.Job(
            kind, model, requests, choices, num_per_prompt=n, has_usage_chunk=has_usage
        )

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

    async def _encoded(
        self, size: int, method: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """What a method of `Prompts` returns; size: about the characters that it looks at."""
        if size > LARGE:
            task = partial(method, **kwargs)
            try:
                return await self._workers.run(task, *args, limit_s=ENCODE_S, size=size)
            except WorkerError as error:
                raise bad_request(f"the prompt could not be encoded: {error}") from None
        loop = asyncio.get_running_loop()
        function = partial(method, self._prompts, *args, **kwargs)
        return await loop.run_in_executor(self._executor, function)


def _reader(body: ChatRequest, forced: Sequence[Tool]) -> answers.MessageReader:
    """How the answer's text is read: as content, as the call it was forced to be, or as both."""
    if not body.tools or body.tool_choice == "none":
        return answers.MessageReader()
    if not forced:
        return answers.AutoCallReader()
    if len(forced) > 1:
        return answers.AnyCallReader()
    # OpenAI says "stop" after a call that was asked for by name.
    return answers.NamedCallReader(
        forced[0].function.name, "tool_calls" if body.tool_choice == "required" else "stop"
    )

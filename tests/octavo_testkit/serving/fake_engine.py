"""An engine without a model: it answers from the prompt's text, by a script."""

import hashlib
import json
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.errors import CapacityError, ConfigError
from octavo.serving.engine.precision import CachePart, LayerPrecision, Precision
from octavo.serving.engine.request import Delta, Request, Saturated, Stats, TokenLogprobs, Usage

EOS = 0
PRECISION = Precision(
    (
        LayerPrecision(kind="kv_cache", num_fp8=28, others={"first": "BF16", "last": "BF16"}),
        LayerPrecision(kind="linear", num_fp8=196, others={"lm_head": "BF16"}),
    ),
    (
        CachePart(kind="full_attention", dtype="float8_e4m3fn", part="pages", num_bytes=28 * 2**20),
        CachePart(kind="full_attention", dtype="bfloat16", part="pages", num_bytes=4 * 2**20),
    ),
)


def fp8_weights():
    """A model with an FP8 weight of 1 MiB and its scales."""
    model = torch.nn.Module()
    model.register_buffer("weight", torch.zeros(1024, 1024, dtype=torch.float8_e4m3fn))
    model.register_buffer("weight_scale", torch.ones(1024))
    return model


class FakeTokenizer:
    """A token for each character."""

    chat_template, bos_token_id = "built in", None
    s_per_mib = 0.0

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def __len__(self) -> int:
        return 0x110000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        time.sleep(self.s_per_mib * (len(text) >> 20))
        return [ord(character) for character in text.encode().decode()]

    def decode(self, tokens: list[int]) -> str:
        text = "".join(chr(token) for token in tokens)
        return text.encode(errors="replace").decode()

    def apply_chat_template(
        self, messages, tools=None, add_generation_prompt=False, tokenize=True
    ) -> str:
        assert not tokenize
        lines = [f"tools: {json.dumps(tools)}"] if tools else []
        for message in messages:
            if message["content"] == "refuse me":
                raise ValueError("roles must alternate")
            content = message["content"]
            if isinstance(content, list):
                content = "".join(part.get("text", "<image>") for part in content)
            lines.append(f"{message['role']}: {content}{message.get('tool_calls', '')}")
        return "\n".join([*lines, "assistant: "] if add_generation_prompt else lines)


# Here, not beside their tests: worker processes import them.
class SlowTokenizer(FakeTokenizer):
    """Takes seconds for what is long."""

    s_per_mib = 1.5


class Deaf(FakeTokenizer):
    """Its chat template does not know tools."""

    def apply_chat_template(self, messages, tools=None, **options):
        return super().apply_chat_template(messages, **options)


@dataclass
class FakeGrammar:
    """A schema; the fake engine answers with a value of it."""

    schema: dict[str, Any]

    def __post_init__(self) -> None:
        match self.schema.get("type"):
            case "impossible":
                raise ConfigError("expected a type of JSON, got 'impossible'")
            case "endless":
                time.sleep(1000)


def instance(schema: dict[str, Any], root: dict[str, Any] | None = None) -> Any:
    """A value that follows the schema."""
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[int(part)] if isinstance(target, list) else target[part]
        return instance(target, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return instance(schema["anyOf"][-1], root)
    match schema.get("type"):
        case "object":
            return {k: instance(v, root) for k, v in schema.get("properties", {}).items()}
        case "array":
            return [instance(schema.get("items", {}), root)]
        case "integer" | "number":
            return 7
        case "boolean":
            return True
    return "text"


@dataclass
class _Running:
    request: Request
    answer: list[int]
    stops: bool
    num_done: int = 0
    deltas: int = 0
    begun_s: float | None = None


class FakeImages(tuple):
    """Images and the prompt they are in, whose places stay as they are."""

    tokens: tuple[int, ...]
    num_pixels: int


@dataclass
class FakeEngine:
    """Deterministic: what follows the prompt's last line, upper case, by the script.

    A prompt that contains `say:` is answered with what follows it. `fail:` fails its request,
    `crash:` the step, `long:` never ends by itself.
    """

    model_name: str = "fake"
    max_context: int = 4096
    max_num_seqs: int = 8
    max_queue: int = 1000
    step_s: float = 0.0
    has_images: bool = False
    precision: Precision = PRECISION
    model: torch.nn.Module = field(default_factory=fp8_weights)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    def __post_init__(self) -> None:
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.ended: dict[str, str] = {}
        self.added: list[Request] = []
        self.is_closed = False
        self.num_readings = 0
        self.saturated = Saturated()
        self.totals = {"prompt_tokens": 0, "completion_tokens": 0, "num_steps": 0}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_open(self) -> int:
        return len(self.waiting) + len(self.running)

    def count_image_tokens(self, width, height) -> int:
        return width * height // 10_000

    def choose_image_reduction(self, width, height, factors) -> int:
        return 1

    def prepare_images(self, prompt, images) -> FakeImages:
        made = FakeImages(images)
        if any(image.size == (13, 13) for image in made):
            raise ConfigError("an image of bad luck")
        made.tokens, made.num_pixels = prompt, sum(x.width * x.height for x in made)
        return made

    def add(self, request: Request) -> None:
        sampling = request.sampling
        if len(request.prompt) + sampling.max_tokens > self.max_context:
            raise ConfigError("too long")
        if len(self.waiting) >= self.max_queue:
            raise CapacityError("the queue is full")
        prompt = self.tokenizer.decode(list(request.prompt))
        if "explode:" in prompt:
            raise RuntimeError("add exploded")
        text = self._text(request, prompt)
        cuts = [text.index(stop) for stop in sampling.stop if stop in text]
        text = text[: min(cuts)] if cuts else text
        answer = self.tokenizer.encode(text)
        stops = len(answer) < sampling.max_tokens
        answer = answer[: sampling.max_tokens]
        self.added.append(request)
        self.waiting.append(_Running(request, answer, stops))

    def _text(self, request: Request, prompt: str) -> str:
        sampling = request.sampling
        if sampling.grammar is not None:
            return json.dumps(instance(sampling.grammar.schema))
        if "long:" in prompt:
            return "la " * sampling.max_tokens
        if "say:" in prompt:
            return prompt.rpartition("say:")[2].partition("\n")[0]
        text = f"{len(request.images)} images" if request.images else prompt[-40:].upper()
        if sampling.temperature and sampling.seed is not None:
            text += hashlib.sha256(f"{sampling.seed}".encode()).hexdigest()[:6]
        return text

    def abort(self, request_id: str) -> None:
        for queue in (self.waiting, self.running):
            for one in [one for one in queue if one.request.request_id == request_id]:
                queue.remove(one)
                self.ended[request_id] = "abort"

    def step(self) -> list[Delta]:
        if self.step_s:
            time.sleep(self.step_s)
        self.totals["num_steps"] += 1
        if self.is_closed:
            everyone = [*self.running, *self.waiting]
            self.running.clear()
            self.waiting.clear()
            return [self._end(one, "abort") for one in everyone]
        while self.waiting and len(self.running) < self.max_num_seqs:
            self.running.append(self.waiting.popleft())
            self.running[-1].begun_s = time.perf_counter()
        deltas = [self._advance(one) for one in self.running]
        self.running = [o for o in self.running if o.request.request_id not in self.ended]
        return deltas

    def _advance(self, one: _Running) -> Delta:
        prompt = self.tokenizer.decode(list(one.request.prompt))
        if "crash:" in prompt and one.num_done >= 2:
            raise RuntimeError("the GPU is gone")
        if "fail:" in prompt and one.num_done >= 2:
            return self._end(one, "error", error="this request cannot go on")
        tokens = one.answer[one.num_done : one.num_done + 1]
        one.num_done += len(tokens)
        self.totals["completion_tokens"] += len(tokens)
        if one.num_done >= len(one.answer):
            return self._end(one, "stop" if one.stops else "length", tokens)
        return self._delta(one, tokens)

    def _end(self, one: _Running, reason: str, tokens=(), error=None) -> Delta:
        assert one.request.request_id not in self.ended
        self.ended[one.request.request_id] = reason
        return self._delta(one, tokens, reason, error)

    def _delta(self, one: _Running, tokens, reason=None, error=None) -> Delta:
        num_top = one.request.sampling.logprobs
        logprobs = None
        if num_top is not None:
            logprobs = tuple(
                TokenLogprobs(t, -0.5, tuple((t + i, -0.5 - i) for i in range(num_top)))
                for t in tokens
            )
        return Delta(
            request_id=one.request.request_id,
            tokens=tuple(tokens),
            text=self.tokenizer.decode(list(tokens)),
            logprobs=logprobs,
            finish_reason=reason,
            error=error,
            begun_s=one.begun_s,
            usage=Usage(prompt_tokens=len(one.request.prompt), completion_tokens=one.num_done),
        )

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_pages=100,
            num_pages_in_use=min(self.num_open, 100),
            num_finished=len(self.ended),
            saturated=self.saturated,
            **self.totals,
        )

    def read_saturation(self) -> None:
        self.num_readings += 1
        self.saturated = Saturated(
            keys=self.num_readings, values=0, linear_inputs=3, checked_linear_inputs=400
        )

    def close(self) -> None:
        self.is_closed = True

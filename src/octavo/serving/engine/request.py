"""What a caller asks the engine for, and what it gets back: no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.errors import ConfigError
from octavo.settings import Count, checked

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20
MAX_BIAS, MAX_BIASES = 100, 300  # OpenAI's range, vLLM's number of tokens
FromZero = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


@checked
class Sampling:
    """How the next tokens are chosen, and when to stop; names and defaults as in OpenAI's API.

    temperature: 0 takes the likeliest token. top_k: 0 is all of them. min_p: relative to the
    likeliest one. logit_bias: pairs of a token and what is added to its logit. seed: the same
    request with the same seed gets the same tokens, whatever else is in its batch; None is a seed
    of its own for each request. logprobs: how many alternatives each token comes with; None is none
    at all, not even its own. stop: texts that end the answer and are not part of it. grammar: what
    the answer must follow, None for anything (`guided`).
    """

    max_tokens: Count = 16
    min_tokens: FromZero = 0
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: FromZero = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    logit_bias: Annotated[tuple[tuple[int, Bias], ...], Field(max_length=MAX_BIASES)] = ()
    seed: Seed | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Any = None

    @property
    def has_penalty(self) -> bool:
        """Whether the tokens of the answer change what follows them, but for the model."""
        counts = self.presence_penalty != 0 or self.frequency_penalty != 0
        return counts or self.repetition_penalty != 1

    @property
    def has_cut(self) -> bool:
        """Whether some tokens are too unlikely to be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"expected min_tokens up to max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise ConfigError("expected one logit_bias for each token, got two for one of them")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how it is answered.

    images: pillow images, one for each place in the prompt; or what `Engine.prepare_images` made of
    them, whose tokens are then the prompt.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    images: Any = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError(f"request {self.request_id}: expected one token or more, got none")


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token, and of the likeliest ones in its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of a request so far; cached ones are those whose pages another request had filled."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class GrammarFailure(str):
    """The `error` of a request whose own grammar ended it; any other error is not the caller's."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one step added to a request.

    text: what can be shown already; a part of a character or of a stop text waits. finish_reason:
    None while there is more to come; "error" comes with `error`, a sentence for the caller.
    begun_s: when the request's first pass was scheduled, by time.perf_counter(); None if none was.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    begun_s: float | None = None
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class Saturated:
    """Values beyond the range of their static FP8 scale so far; None where no layer counts them.

    checked_linear_inputs: how many inputs of linear layers were looked at.
    """

    keys: int | None = None
    values: int | None = None
    linear_inputs: int | None = None
    checked_linear_inputs: int = 0


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The engine now, and its totals since it started."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_in_use: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_steps: int = 0
    saturated: Saturated = Saturated()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to one prompt: its tokens, its text, and why it ended."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


def gather(deltas: Sequence[Delta]) -> Completion:
    """The answer that the deltas of one request add up to; the last one must have ended it."""
    last = deltas[-1] if deltas else None
    if last is None or last.finish_reason is None:
        raise ConfigError("expected all deltas of a request that has finished, got fewer")
    logprobs = [one for delta in deltas for one in delta.logprobs or ()]
    return Completion(
        request_id=last.request_id,
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        text="".join(delta.text for delta in deltas),
        finish_reason=last.finish_reason,
        usage=last.usage,
        logprobs=tuple(logprobs) if last.logprobs is not None or logprobs else None,
        error=last.error,
    )

"""A request in the engine: its tokens, how many of them are computed, and where they lie."""

from array import array
from collections.abc import Sequence as AnySequence
from typing import Any, Literal

from octavo.serving.engine.request import FinishReason, Request, Usage
from octavo.serving.engine.text import TextStream

State = Literal["waiting", "running", "finished"]


class Sequence:
    """A request's tokens and pages; no tensors.

    tokens: of the prompt and the answer; output: of the answer alone, so far. arrival: its place
    among all requests, first come first served. seed: what its samples are drawn by. stream: makes
    its text; grammar: its place in what it must follow; None if it has none. spans: where its
    images are, with the hash of each; image_start, image_stop: from the first to the last of them,
    both 0 without. Tokens in between have positions of three parts, those before have their index,
    and those after it their index + position_offset. num_computed: how many tokens have their keys
    and values in pages. num_cached: how many of the prompt others had filled when it first ran.
    begun_s: when that was, by time.perf_counter(). hashes: of its full pages, as far as they were
    needed; the first num_published of them can be found.
    """

    stream: TextStream | None = None
    grammar: Any = None

    def __init__(self, request: Request, arrival: int, *, seed: int = 0) -> None:
        self.request, self.arrival, self.seed = request, arrival, seed
        self.request_id = request.request_id
        self.spans: AnySequence[Any] = getattr(request.images, "spans", ())
        self.image_start = self.spans[0].start if self.spans else 0
        self.image_stop = self.spans[-1].stop if self.spans else 0
        self.position_offset: int = getattr(request.images, "offset", 0)
        self.tokens = list(request.prompt)
        self.output = array("q")  # penalties are computed on copies of its memory
        self.pages = array("i")  # a step's page table is made of copies of their memory
        self.hashes: list[bytes] = []
        self.num_computed = 0
        self.num_published = 0
        self.num_cached: int | None = None
        self.begun_s: float | None = None
        self.state: State = "waiting"
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those generated so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next step may compute: 1 when decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def max_computed(self) -> int:
        """Tokens that are computed at most: the last one of an answer is not."""
        return len(self.request.prompt) + self.request.sampling.max_tokens - 1

    @property
    def usage(self) -> Usage:
        """Tokens so far, as the caller counts them."""
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached or 0,
        )

    def salt(self, start: int, stop: int) -> bytes:
        """What besides these tokens decides their keys and values: the images among them."""
        return b"".join(s.digest for s in self.spans if s.start < stop and s.stop > start)

    def append(self, token: int) -> None:
        """Take a new token, which is not computed yet."""
        self.tokens.append(token)
        self.output.append(token)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.state}, {self.num_computed} of "
            f"{self.num_tokens} tokens, {len(self.pages)} pages)"
        )

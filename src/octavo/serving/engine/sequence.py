"""A request in the engine: its tokens, how many of them are computed, and where they lie."""

from array import array
from typing import Literal

from octavo.serving.engine.request import FinishReason, Request, Usage

State = Literal["waiting", "running", "finished"]


class Sequence:
    """A request's tokens and pages; no tensors.

    tokens: of the prompt and the answer; output: of the answer alone, so far. arrival: its place
    among all requests, first come first served. seed: what its samples are drawn by. salt: what
    else decides its keys and values, such as the content of its images; part of its pages' hashes.
    num_computed: how many tokens have their keys and values in pages. num_cached: how many of the
    prompt others had filled when it first ran. hashes: of its full pages, as far as they were
    needed; the first num_published of them can be found.
    """

    def __init__(self, request: Request, arrival: int, *, seed: int = 0, salt: bytes = b"") -> None:
        self.request, self.arrival, self.seed, self.salt = request, arrival, seed, salt
        self.tokens = list(request.prompt)
        self.output = array("q")  # penalties are computed on copies of its memory
        self.pages = array("i")  # a step's page table is made of copies of their memory
        self.hashes: list[bytes] = []
        self.num_computed = 0
        self.num_published = 0
        self.num_cached: int | None = None
        self.state: State = "waiting"
        self.finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        """The request's own."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those generated so far."""
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next step may compute: 1 when decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def usage(self) -> Usage:
        """Tokens so far, as the caller counts them."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached or 0,
        )

    def append(self, token: int) -> None:
        """Take a new token, which is not computed yet."""
        self.tokens.append(token)
        self.output.append(token)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.state}, {self.num_computed} of "
            f"{self.num_tokens} tokens, {len(self.pages)} pages)"
        )

"""How an engine runs."""

from typing import Annotated

from pydantic import Field

from octavo.errors import ConfigError
from octavo.settings import Count, checked


@checked
class EngineSettings:
    """How much runs at once, and how much memory the cache takes.

    max_num_seqs: requests that run. max_num_batched_tokens: tokens of one forward pass; longer
    prompts are computed in several. max_queue: requests that may wait. max_context: tokens of a
    prompt and its answer together; None is the model's own, or what the cache holds if that is
    less. enable_prefix_caching: whether full pages are kept and found by prompts that begin alike.
    page_size: tokens of a page. num_pages: of the cache; None takes what memory has room for:
    memory_fraction of a GPU's, all that is in use included, or one GiB on a CPU. seed: what the
    seeds of requests without one are drawn by. cuda_graphs: whether steps that only decode are
    replayed from CUDA graphs; None is where they can be. compile: whether torch.compile makes
    kernels of what lies around attention.
    """

    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 2048
    max_queue: Count = 1024
    max_context: Count | None = None
    enable_prefix_caching: bool = True
    page_size: int = 64
    num_pages: Count | None = None
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    seed: int = 0
    cuda_graphs: bool | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"expected max_num_batched_tokens of max_num_seqs ({self.max_num_seqs}) or more, "
                f"so that every running request gets a token, got {self.max_num_batched_tokens}"
            )

"""How one step's batch is split into decoding and prompts, and what octavo's ops take for each."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from octavo.numerics.decode_plan import DecodePlan
from octavo.ops.plan_decode import MAX_QUERY_TOKENS


def count_decodes(query_lens: Sequence[int]) -> tuple[int, int]:
    """How many requests at the front of a batch are one call of decode_attention, and its q_len.

    They have equally many query tokens, of which decoding takes a few.
    """
    q_len = query_lens[0] if query_lens else 0
    if not 1 <= q_len <= MAX_QUERY_TOKENS:
        return 0, 0
    others = (index for index, length in enumerate(query_lens) if length != q_len)
    return next(others, len(query_lens)), q_len


@dataclass(frozen=True, eq=False)
class Requests:
    """The rows of a batch that one op serves: their pages, lengths and query tokens.

    tokens: where their query tokens lie among those of the batch. max_query_len: the most that one
    of them has. num_cached_tokens: an upper bound of the sum of their lengths.
    """

    page_table: Tensor
    lengths: Tensor
    tokens: slice
    max_query_len: int
    num_cached_tokens: int = 0

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of vLLM, as octavo's ops take it; the layers of a KV cache group share it.

    decodes: the requests at the front, with equally many query tokens. prompts: those behind, with
    cu_seqlens of their query tokens. Either may be missing. plans: of the decodes, by what layers
    have in common that share one; layers fill it.
    """

    decodes: Requests | None
    prompts: Requests | None
    cu_seqlens: Tensor | None = None
    plans: dict[Hashable, DecodePlan] = field(default_factory=dict)

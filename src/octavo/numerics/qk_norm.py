"""RMS norms of queries and keys: their weights, and which tokens have which."""

from dataclasses import dataclass

from torch import Tensor

from octavo.errors import ConfigError


@dataclass(frozen=True, eq=False)
class QkNorm:
    """Each query and key over the root of the mean of its squares, times a weight.

    q, k: weights [streams, head_dim] in bf16, fp16 or fp32, of one stream or of two, as where texts
    and images have norms of their own. num_first: of two streams, how many tokens of each sequence
    are of the first; the others follow. eps is added to the mean.
    """

    q: Tensor
    k: Tensor
    eps: float
    num_first: int = 0

    def __post_init__(self) -> None:
        if self.q.dim() != 2 or self.q.shape != self.k.shape or len(self.q) not in (1, 2):
            raise ConfigError(
                "expected norm weights of q and k [1 or 2 streams, head_dim], got "
                f"{list(self.q.shape)} and {list(self.k.shape)}"
            )
        if self.q.dtype != self.k.dtype:
            raise ConfigError(
                f"expected norm weights of one dtype, got {self.q.dtype} and {self.k.dtype}"
            )
        if not 0 < self.eps < float("inf"):  # 0 would make NaN of zeros
            raise ConfigError(f"expected a finite eps above 0, got {self.eps}")
        if self.num_first < 0 or (self.num_first and len(self.q) == 1):
            raise ConfigError(
                f"expected num_first of 0 or more, and 0 for one stream, got {self.num_first}"
            )

    def check(self, length: int, head_dim: int) -> None:
        """Raise unless the weights fit sequences of this length and this head_dim."""
        if self.q.shape[1] != head_dim:
            raise ConfigError(f"expected norm weights of {head_dim} values, got {self.q.shape[1]}")
        if self.num_first > length:
            raise ConfigError(
                f"expected num_first of at most {length} tokens, got {self.num_first}"
            )

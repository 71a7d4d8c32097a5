"""Rotary embedding: the tables of one call, and which pairs of values they turn."""

from dataclasses import dataclass

from torch import Tensor

from octavo.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Rotary:
    """Angles by which pairs of values of each query and key are turned.

    cos, sin: [rows, rotary_dim / 2] in bf16, fp16 or fp32, any strides. Row i belongs to tokens i,
    i + rows, i + 2·rows, …: one row for each token, or the rows of one sequence for a dense batch
    of equal ones. Positions, sections (mrope) and scaling are the model's business: tables come as
    the model made them.
    is_interleaved: a pair is (2j, 2j + 1); otherwise (j, j + rotary_dim / 2), as in GPT-NeoX. Only
    the first rotary_dim values of a head are turned, the others stay (partial rotary embedding).
    """

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False

    def __post_init__(self) -> None:
        if self.cos.dim() != 2 or self.cos.shape != self.sin.shape:
            raise ConfigError(
                "expected cos and sin of one shape [rows, rotary_dim / 2], got "
                f"{list(self.cos.shape)} and {list(self.sin.shape)}"
            )
        if self.cos.dtype != self.sin.dtype or not self.cos.is_floating_point():
            raise ConfigError(
                f"expected cos and sin of one floating dtype, got {self.cos.dtype} and "
                f"{self.sin.dtype}"
            )

    @property
    def rotary_dim(self) -> int:
        """How many values of each head are turned."""
        return 2 * self.cos.shape[1]

    def check(self, num_tokens: int, head_dim: int) -> None:
        """Raise unless the tables fit this many tokens of this head_dim."""
        rows = self.cos.shape[0]
        if self.rotary_dim > head_dim:
            raise ConfigError(
                f"expected tables of at most head_dim / 2 = {head_dim // 2} columns, got "
                f"{self.cos.shape[1]}"
            )
        if num_tokens and (rows == 0 or num_tokens % rows):
            raise ConfigError(
                f"expected tables whose rows divide the {num_tokens} tokens, got {rows} rows"
            )

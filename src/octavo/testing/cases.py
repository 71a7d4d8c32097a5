"""Shapes as data: one row of a table is one test, and str() is its name."""

from dataclasses import dataclass, fields

import torch

from octavo.cache.spec import Layout
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, PerToken


class Case:
    """A row of a table; str() names what differs from the default."""

    def __str__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"{field.name}={value}".replace(" ", ""))
        return "-".join(shown) or "default"


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """A dense batch: kv_len is q_len unless given."""

    batch: int = 2
    q_len: int = 65
    kv_len: int | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    spec: AttentionSpec = AttentionSpec()
    has_sinks: bool = False
    has_key_mask: bool = False

    @property
    def num_keys(self) -> int:
        """How many keys each sequence has."""
        return self.q_len if self.kv_len is None else self.kv_len


@dataclass(frozen=True, kw_only=True)
class PackedCase(Case):
    """Sequences of several lengths in one tensor: kv_lens are q_lens unless given."""

    q_lens: tuple[int, ...] = (1, 63, 0, 65)
    kv_lens: tuple[int, ...] | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    spec: AttentionSpec = AttentionSpec()
    has_sinks: bool = False

    @property
    def key_lens(self) -> tuple[int, ...]:
        """How many keys each sequence has."""
        return self.q_lens if self.kv_lens is None else self.kv_lens


@dataclass(frozen=True, kw_only=True)
class PagedCase(Case):
    """A batch over a paged cache: lengths are the tokens in the cache, the newest q_lens included.

    A decode batch has the same number of queries in every sequence.
    """

    lengths: tuple[int, ...] = (1, 63, 64, 65, 130)
    q_lens: tuple[int, ...] = (1, 1, 1, 1, 1)
    page_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = PerTensor()
    layout: Layout = "head_major"
    spec: AttentionSpec = AttentionSpec(causal=True)
    has_sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class MatmulCase(Case):
    """a [rows, depth] by a weight b [columns, depth]; a plain activation has granularity None."""

    rows: int = 63
    columns: int = 65
    depth: int = 192
    a: Granularity | None = PerToken()
    b: Granularity = PerChannel()
    has_bias: bool = False


# Query and KV heads: as many, grouped, one for all, and groups that are no power of two.
HEADS = ((4, 4), (8, 2), (4, 1), (9, 3), (7, 1))
HEAD_DIMS = (32, 64, 72, 80, 96, 128, 192, 256)

# The sizes at which tiles, chunks and pages begin and end.
LENGTHS = (
    AttentionCase(batch=0),
    AttentionCase(q_len=0),
    AttentionCase(q_len=1),
    AttentionCase(q_len=63),
    AttentionCase(q_len=128),
    AttentionCase(q_len=129),
    AttentionCase(q_len=5, kv_len=0),
    AttentionCase(q_len=1, kv_len=130),
    AttentionCase(q_len=63, kv_len=257),
    AttentionCase(q_len=130, kv_len=63),
    AttentionCase(batch=1, q_len=520, kv_len=600, num_heads=1, num_kv_heads=1, head_dim=32),
    AttentionCase(batch=3, q_len=65, kv_len=64, num_heads=9, num_kv_heads=3, head_dim=72),
)

PACKED = (
    PackedCase(),
    PackedCase(q_lens=()),
    PackedCase(q_lens=(0, 0)),
    PackedCase(q_lens=(129,)),
    PackedCase(q_lens=(1, 1, 1), kv_lens=(0, 63, 129)),
    PackedCase(q_lens=(5, 0, 130), kv_lens=(64, 7, 65)),
    PackedCase(q_lens=(65, 2), num_heads=9, num_kv_heads=3, head_dim=72),
)

# Every granularity of an activation against every one of a weight.
MATMULS = tuple(
    MatmulCase(a=a, b=b, has_bias=has_bias)
    for a in (None, PerTensor(), PerToken(), PerBlock(1, 64))
    for b in (PerTensor(), PerChannel(), PerBlock(64, 64), PerBlock(1, 64))
    for has_bias in (False, True)
)

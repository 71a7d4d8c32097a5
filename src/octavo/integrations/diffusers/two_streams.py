"""Queries, keys and values of text and image, before a stock processor concatenates them.

The backend quantizes them from where they are. What the processor concatenates is then used by
nobody, and a compiler leaves it out.
"""

from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]


class Streams:
    """What one call of a layer makes, until its backend takes it.

    q, k and v are those of the image, first_q, first_k and first_v those of the text.
    """

    def __init__(self) -> None:
        self._noted: dict[str, Tensor] = {}

    def note(self, name: str, x: Tensor) -> Tensor:
        """Keep x for the backend; returns it."""
        self._noted[name] = x
        return x

    def clear(self) -> None:
        """Keep nothing any longer."""
        self._noted.clear()

    def take(self, whole: Three, num_first: int) -> tuple[Three, Three] | None:
        """Image and text of a call whose concatenation is `whole`; None if they are not all there.

        num_first: tokens of the text. q, k and v [batch, length, heads, head_dim]. Nothing is kept.
        """
        noted = [self._noted.get(name) for name in ("q", "k", "v", "first_q", "first_k", "first_v")]
        self.clear()
        found: list[Tensor] = []
        for x, like in zip(noted, whole + whole, strict=True):
            if x is not None and x.dim() == 3 and x.shape[2] % like.shape[3] == 0:
                x = x.unflatten(-1, (-1, like.shape[3]))
            if x is None or x.dtype != like.dtype:
                return None
            num_tokens = like.shape[1] - num_first if len(found) < 3 else num_first
            if x.shape != (like.shape[0], num_tokens, *like.shape[2:]):
                return None
            found.append(x)
        q, k, v, first_q, first_k, first_v = found
        return (q, k, v), (first_q, first_k, first_v)

"""What a model will be used for: as far as it decides what to quantize."""

import re
from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of so many tokens, so many at once, with answers; images of this height and width.

    num_images: of one request.
    """

    context: int = 8192
    concurrency: int = 1
    output_len: int = 512
    image_size: tuple[int, int] = (1080, 1920)
    num_images: int = 1

    def __post_init__(self) -> None:
        counts = (self.context, self.concurrency, self.output_len, self.num_images)
        if min(*counts, *self.image_size) < 1:
            raise ConfigError(f"expected sizes and counts of at least 1, got {self}")


def parse_size(text: str) -> tuple[int, int]:
    """Height and width of "1920x1080", which is width and height, or of hd, fullhd, qhd, 4k."""
    from octavo.measure.bench.encoder import RESOLUTIONS

    if (named := RESOLUTIONS.get(text.strip().lower())) is not None:
        return named
    found = re.fullmatch(r"([0-9]+)x([0-9]+)", text.strip().lower())
    if found is None:
        raise ConfigError(
            f"expected an image size such as 1920x1080, or {', '.join(RESOLUTIONS)}; got {text!r}"
        )
    return int(found[2]), int(found[1])

"""What requests for pictures look like: OpenAI's fields, and those of diffusers."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from octavo.brief import brief
from octavo.serving.engine.image_request import MAX_SIDE
from octavo.serving.server.schema import MAX_INT, Body, only

AUTO = "auto"
SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
MAX_PROMPT = 32_000  # characters, OpenAI's


def _check_size(size: str) -> str:
    found = SIZE.fullmatch(size)
    if size != AUTO and found is None:
        raise ValueError(f"expected auto or WIDTHxHEIGHT, such as 1024x1024, got {brief(size)}")
    if found is not None and max(map(int, found.groups())) > MAX_SIDE:
        raise ValueError(f"expected sides of at most {MAX_SIDE} pixels, got {size}")
    return size


class ImageRequest(Body):
    """The body of /v1/images/generations."""

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    model: Annotated[str, Field(max_length=1000)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    size: Annotated[str, AfterValidator(_check_size)] | None = None
    user: str | None = None
    # of diffusers
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=1000)] | None = None
    true_cfg_scale: Annotated[float, Field(ge=0, le=1000)] | None = None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    # Pictures stay in no file of the server: there is no URL for them.
    response_format: Annotated[Any, only("b64_json")] = None
    # known, not served
    background: Annotated[Any, only(AUTO, "opaque")] = None
    moderation: Annotated[Any, only(AUTO)] = None
    output_compression: Annotated[Any, only(100)] = None
    output_format: Annotated[Any, only("png")] = None
    partial_images: Annotated[Any, only(0)] = None
    quality: Annotated[Any, only(AUTO)] = None
    stream: Annotated[Any, only(False)] = None
    style: Annotated[Any, only()] = None

    def width_and_height(self) -> tuple[int, int] | tuple[None, None]:
        """What `size` says; (None, None) leaves it to the pipeline."""
        found = SIZE.fullmatch(self.size or "")
        return (int(found[1]), int(found[2])) if found else (None, None)

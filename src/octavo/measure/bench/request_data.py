"""Prompts for benchmarks: a user's JSON Lines, ShareGPT's form, and images of noise or a data set.

Those for a server are texts: how many tokens one has is the server's to say. Names of data sets are
vLLM's.
"""

import base64
import io
import json
import math
import random
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.errors import ConfigError, UnsupportedError
from octavo.measure.records import Scalar

HUMAN = ("human", "user")
# What vLLM keeps of ShareGPT: at least so many tokens in and out, at most so many in, and in all.
MIN_LEN, MAX_INPUT, MAX_TOTAL = 4, 1024, 2048
QUESTION = "Describe the image."


@dataclass(frozen=True)
class ServingPrompt:
    """A text, how many tokens answer it at most, and images as data URLs, for chat alone."""

    text: str
    output_len: int
    images: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Prompts in the order they are sent; seed: of the choice, and of arrivals."""

    prompts: tuple[ServingPrompt, ...]
    seed: int = 0
    facts: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("expected a data set with prompts, got none")

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        return {"num_prompts": self.num_prompts, "seed": self.seed, **self.facts}

    @property
    def num_prompts(self) -> int:
        """How many there are."""
        return len(self.prompts)

    @property
    def has_images(self) -> bool:
        """Whether a prompt has some."""
        return any(prompt.images for prompt in self.prompts)

    def draw(self, vocab_size: int) -> list[ServingPrompt]:
        """The prompts; vocab_size is for random tokens."""
        return list(self.prompts)


@dataclass(frozen=True, kw_only=True)
class ImageRequests:
    """Requests with images, random or of a data set; the names are those of vLLM's options.

    Attributes:
        dataset_name: random-mm (images of noise) or hf.
        dataset_path: For hf: a folder of images, a .jsonl or .parquet file, or a data set's name.
        hf_subset: Of a data set.
        hf_split: Of a data set.
        num_prompts: Requests to time.
        random_input_len: Letters in a random prompt.
        base_items_per_request: Images in a random request.
        bucket_config: Sizes of random images and their shares: {(256, 256, 1): 0.5, …}.
        seed: Of random images and prompts.
    """

    dataset_name: str = "random-mm"
    dataset_path: str | None = None
    hf_subset: str | None = None
    hf_split: str = "train"
    num_prompts: int = 10
    random_input_len: int = 32
    base_items_per_request: int = 1
    bucket_config: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset_name not in ("random-mm", "hf"):
            raise ConfigError(
                f"expected a dataset name of random-mm, hf; got {self.dataset_name!r}"
            )
        if (self.dataset_name == "hf") != (self.dataset_path is not None):
            raise ConfigError(
                "expected a dataset path for hf and none for random-mm, got "
                f"{self.dataset_path!r} for {self.dataset_name}"
            )
        if min(self.num_prompts, self.base_items_per_request, self.random_input_len) < 1:
            raise ConfigError(
                f"expected at least one prompt, one image and one byte of text, got "
                f"{self.num_prompts}, {self.base_items_per_request} and {self.random_input_len}"
            )
        parse_buckets(self.bucket_config)


Bucket = tuple[int, int, int]  # height, width, frames
# As in vLLM's random-mm: half of the images small, half HD.
BUCKETS: Mapping[Bucket, float] = {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}


def parse_buckets(text: str | None) -> Mapping[Bucket, float]:
    """Sizes and their probabilities from "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}".

    A bucket of probability 0 is left out, videos (more than one frame) are refused otherwise.
    """
    if text is None:
        return BUCKETS
    try:
        buckets = {
            (int(height), int(width), int(frames)): float(weight)
            for (height, width, frames), weight in literal_eval(text).items()
        }
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(
            f"expected buckets such as {{(256, 256, 1): 0.5}}, got {text!r}: {error}"
        ) from None
    used = {bucket: weight for bucket, weight in buckets.items() if weight != 0}
    if not used or any(min(bucket) < 1 or not 0 < w < math.inf for bucket, w in used.items()):
        raise ConfigError(f"expected positive sizes and probabilities, got {text!r}")
    if any(frames > 1 for _, _, frames in used):
        raise UnsupportedError(f"expected images, of one frame each, got videos in {text!r}")
    return used


@dataclass(frozen=True)
class ImagePrompt:
    """A text and its pillow images."""

    prompt: str
    images: tuple[Any, ...]


def custom_data(
    path: Path, num_prompts: int, *, output_len: int | None = None, seed: int = 0
) -> DataSet:
    """A user's JSON Lines: {"prompt": "…", "output_tokens": 128}, chosen by the seed.

    output_len: of all answers; None is each row's own output_tokens.
    """
    prompts = [_custom(row, where, output_len) for row, where in _json_lines(path)]
    return _choose("custom", path, prompts, num_prompts, seed)


def _custom(row: Mapping[str, Any], where: str, output_len: int | None) -> ServingPrompt:
    text, own = row.get("prompt"), row.get("output_tokens")
    if not isinstance(text, str) or not text:
        raise ConfigError(f'{where}: expected {{"prompt": "a text"}}, got {brief(dict(row))}')
    if output_len is None and (isinstance(own, bool) or not isinstance(own, int) or own < 1):
        raise ConfigError(
            f"{where}: expected output_tokens of at least 1, got {own!r}; or one length for all"
        )
    return ServingPrompt(text, int(own) if output_len is None else output_len)  # type: ignore[arg-type]


def sharegpt_data(
    path: Path,
    num_prompts: int,
    *,
    output_len: int | None = None,
    count_tokens: Callable[[str], int] | None = None,
    seed: int = 0,
) -> DataSet:
    """The first question of each conversation of a JSON file in ShareGPT's form.

    output_len: of all answers; None is as many tokens as the answer in the file has, which only a
    tokenizer can count. With one, vLLM's limits apply: 4 tokens or more in and out, up to 1024 in
    and 2048 in all.
    """
    if output_len is None and count_tokens is None:
        raise ConfigError("expected a length of answers, or a tokenizer to count those of the file")
    try:
        rows = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a JSON list of conversations: {error}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: expected a JSON list of conversations, got {brief(rows)}")
    prompts = []
    for number, row in enumerate(rows):
        pair = _first_turns(row, f"{path}, conversation {number}")
        if pair is None:
            continue
        question, answer = pair
        length = output_len or (count_tokens(answer) if count_tokens else 0)
        if count_tokens is not None:
            num_input = count_tokens(question)
            if min(num_input, length) < MIN_LEN or num_input > MAX_INPUT:
                continue
            if num_input + length > MAX_TOTAL:
                continue
        prompts.append(ServingPrompt(question, length))
    return _choose("sharegpt", path, prompts, num_prompts, seed)


def _first_turns(row: Any, where: str) -> tuple[str, str] | None:
    """The first question and its answer; None if the conversation does not begin with them."""
    turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
    if not isinstance(turns, list):
        raise ConfigError(f'{where}: expected {{"conversations": […]}}, got {brief(row)}')
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ConfigError(f'{where}: expected turns with "from" and "value", got {brief(turn)}')
    if len(turns) < 2 or turns[0].get("from") not in HUMAN or not turns[0]["value"]:
        return None
    return turns[0]["value"], turns[1]["value"]


def random_mm_data(asked: ImageRequests, *, output_len: int) -> DataSet:
    """Random letters with random images, of vLLM's sizes and shares."""
    prompts = [
        ServingPrompt(one.prompt, output_len, tuple(map(_data_url, one.images)))
        for one in make_image_prompts(asked)
    ]
    facts: dict[str, Scalar] = {
        "dataset": "random-mm",
        "input_len": asked.random_input_len,
        "output_len": output_len,
        "items_per_request": asked.base_items_per_request,
    }
    if asked.bucket_config is not None:
        facts["bucket_config"] = asked.bucket_config
    return DataSet(prompts=tuple(prompts), seed=asked.seed, facts=facts)


def _data_url(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _json_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    try:
        # Not splitlines: JSON may have other ends of lines inside its texts.
        lines = path.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a JSON Lines file: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: expected a line of JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected a JSON object, got {brief(row)}")
        yield row, where


def _choose(
    name: str, path: Path, prompts: list[ServingPrompt], num_prompts: int, seed: int
) -> DataSet:
    """So many of the prompts in an order of the seed; ConfigError if there are fewer."""
    if len(prompts) < num_prompts:
        raise ConfigError(
            f"{path}: expected {num_prompts} prompts or more, got {len(prompts)}: ask for fewer"
        )
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    chosen = tuple(shuffled[:num_prompts])
    data = DataSet(prompts=chosen, seed=seed, facts={"dataset": name, "dataset_file": path.name})
    lengths = {prompt.output_len for prompt in chosen}
    if len(lengths) == 1:
        data = replace(data, facts={**data.facts, "output_len": lengths.pop()})
    return data


def make_image_prompts(asked: ImageRequests) -> list[ImagePrompt]:
    """The prompts that were asked for; ConfigError if a data set has too few."""
    from octavo.calibration.data import open_images

    if asked.dataset_path is None:
        return _random_prompts(asked)
    data = open_images(asked.dataset_path, split=asked.hf_split, subset=asked.hf_subset)
    prompts = [tuple(images) for images in data.prompts(asked.num_prompts)]
    if len(prompts) < asked.num_prompts:
        raise ConfigError(
            f"expected {asked.num_prompts} prompts in {asked.dataset_path}, got "
            f"{len(prompts)}: ask for fewer"
        )
    return [ImagePrompt(QUESTION, images) for images in prompts]


def _random_prompts(asked: ImageRequests) -> list[ImagePrompt]:
    import numpy as np
    from PIL import Image

    buckets = parse_buckets(asked.bucket_config)
    chooser, pixels = random.Random(asked.seed), np.random.default_rng(asked.seed)
    found = []
    for _ in range(asked.num_prompts):
        sizes = chooser.choices(
            list(buckets), list(buckets.values()), k=asked.base_items_per_request
        )
        images = tuple(
            Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8))
            for height, width, _ in sizes
        )
        letters = chooser.choices("abcdefghijklmnopqrstuvwxyz ", k=asked.random_input_len)
        found.append(ImagePrompt("".join(letters), images))
    return found

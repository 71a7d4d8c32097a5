"""Prompts of data sets for a server under load: ShareGPT's form, a user's JSON Lines, images.

They are texts: how many tokens one has is the server's to say. Names of data sets are vLLM's.
"""

import base64
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.brief import brief
from octavo.errors import ConfigError
from octavo.measure.bench.request_times import RandomPrompt
from octavo.measure.records import Scalar

if TYPE_CHECKING:
    from octavo.measure.bench.images import DataOptions

NAMES = ("random", "sharegpt", "custom", "random-mm")
HUMAN = ("human", "user")
# What vLLM keeps of ShareGPT: at least so many tokens in and out, at most so many in, and in all.
MIN_LEN, MAX_INPUT, MAX_TOTAL = 4, 1024, 2048


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
    about: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("expected a data set with prompts, got none")

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


def request_body(prompt: RandomPrompt | ServingPrompt, *, is_chat: bool) -> dict[str, Any]:
    """The prompt as OpenAI's completions or chat take it."""
    if isinstance(prompt, RandomPrompt):
        return {"prompt": list(prompt.tokens)}
    if not is_chat:
        return {"prompt": prompt.text}
    content: Any = prompt.text
    if prompt.images:
        content = [
            {"type": "text", "text": prompt.text},
            *({"type": "image_url", "image_url": {"url": url}} for url in prompt.images),
        ]
    return {"messages": [{"role": "user", "content": content}]}


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


def random_mm_data(options: "DataOptions", *, output_len: int) -> DataSet:
    """Random letters with random images, of vLLM's sizes and shares."""
    from octavo.measure.bench.images import make_requests

    prompts = [
        ServingPrompt(request.prompt, output_len, tuple(map(_data_url, request.images)))
        for request in make_requests(options)
    ]
    about: dict[str, Scalar] = {
        "dataset": "random-mm",
        "input_len": options.random_input_len,
        "output_len": output_len,
        "items_per_request": options.base_items_per_request,
    }
    if options.bucket_config is not None:
        about["bucket_config"] = options.bucket_config
    return DataSet(prompts=tuple(prompts), seed=options.seed, about=about)


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
    data = DataSet(prompts=chosen, seed=seed, about={"dataset": name, "dataset_file": path.name})
    lengths = {prompt.output_len for prompt in chosen}
    if len(lengths) == 1:
        data = replace(data, about={**data.about, "output_len": lengths.pop()})
    return data

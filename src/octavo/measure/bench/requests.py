"""Requests of benchmarks: their prompts, and what their times add up to.

Names of data sets are vLLM's. Prompts for a server are texts: how many tokens one has is the
server's to say. Times are summed up in the fields of vLLM's `bench serve`, whoever served.
"""

import base64
import io
import itertools
import json
import math
import random
from ast import literal_eval
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.calibration.rows import read_jsonl
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.measure.bench.expect import expect, expect_one_of
from octavo.measure.records import Scalar

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
HUMAN = ("human", "user")
# What vLLM keeps of ShareGPT: at least so many tokens in and out, at most so many in, and in all.
MIN_LEN, MAX_INPUT, MAX_TOTAL = 4, 1024, 2048
QUESTION = "Describe the image."


@dataclass(frozen=True)
class Prompt:
    """Tokens, or a text and images (data URLs) for chat; and how many tokens answer it at most."""

    output_len: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    images: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Prompts in the order they are sent; seed: of the choice, and of arrivals."""

    prompts: tuple[Prompt, ...]
    seed: int = 0
    facts: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expect(bool(self.prompts), "a data set with prompts", "none")

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        return {"num_prompts": self.num_prompts, "seed": self.seed, **self.facts}

    @property
    def num_prompts(self) -> int:
        """How many there are."""
        return len(self.prompts)


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
        name, path = self.dataset_name, self.dataset_path
        expect_one_of("a dataset name", ("random-mm", "hf"), name)
        is_right = (name == "hf") == (path is not None)
        expect(is_right, "a dataset path for hf and none for random-mm", f"{path!r} for {name}")
        counts = (self.num_prompts, self.base_items_per_request, self.random_input_len)
        expect(min(counts) >= 1, "at least one prompt, one image and one byte of text", counts)
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
    is_right = all(min(bucket) >= 1 and 0 < w < math.inf for bucket, w in used.items())
    expect(bool(used) and is_right, "positive sizes and probabilities", repr(text))
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
    try:
        rows = list(read_jsonl(path))
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"expected a JSON Lines file: {error}") from None
    prompts = []
    for row in rows:
        own: dict[str, Any] = row.content if isinstance(row.content, dict) else {}
        text: Any = own.get("prompt")
        length: Any = output_len or own.get("output_tokens")
        is_text = isinstance(text, str) and bool(text)
        expect(is_text, '{"prompt": "a text"}', brief(row.content), row.where)
        is_count = isinstance(length, int) and not isinstance(length, bool) and length >= 1
        got = f"{length!r}; or one length for all"
        expect(is_count, "output_tokens of at least 1", got, row.where)
        prompts.append(Prompt(length, text=text))
    return _choose("custom", path, prompts, num_prompts, seed)


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
    expect(isinstance(rows, list), "a JSON list of conversations", brief(rows), str(path))
    prompts = []
    for number, row in enumerate(rows):
        where, own = f"{path}, conversation {number}", row if isinstance(row, dict) else {}
        turns: Any = own.get("conversations", own.get("conversation"))
        expect(isinstance(turns, list), '{"conversations": […]}', brief(row), where)
        for turn in turns:
            is_turn = isinstance(turn, dict) and isinstance(turn.get("value"), str)
            expect(is_turn, 'turns with "from" and "value"', brief(turn), where)
        if len(turns) < 2 or turns[0].get("from") not in HUMAN or not turns[0]["value"]:
            continue
        question, answer = (turn["value"] for turn in turns[:2])
        length = output_len or (count_tokens(answer) if count_tokens else 0)
        if count_tokens is not None:
            num_input = count_tokens(question)
            is_long_enough = min(num_input, length) >= MIN_LEN
            if not is_long_enough or num_input > MAX_INPUT or num_input + length > MAX_TOTAL:
                continue
        prompts.append(Prompt(length, text=question))
    return _choose("sharegpt", path, prompts, num_prompts, seed)


def random_mm_data(asked: ImageRequests, *, output_len: int) -> DataSet:
    """Random letters with random images, of vLLM's sizes and shares."""
    prompts = []
    for one in make_image_prompts(asked):
        urls = []
        for image in one.images:
            file = io.BytesIO()
            image.save(file, "PNG")
            urls.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
        prompts.append(Prompt(output_len, text=one.prompt, images=tuple(urls)))
    facts: dict[str, Scalar] = {
        "dataset": "random-mm",
        "input_len": asked.random_input_len,
        "output_len": output_len,
        "items_per_request": asked.base_items_per_request,
    }
    if asked.bucket_config is not None:
        facts["bucket_config"] = asked.bucket_config
    return DataSet(prompts=tuple(prompts), seed=asked.seed, facts=facts)


def _choose(name: str, path: Path, prompts: list[Prompt], num_prompts: int, seed: int) -> DataSet:
    """So many of the prompts in an order of the seed; ConfigError if there are fewer."""
    got = f"{len(prompts)}: ask for fewer"
    expect(len(prompts) >= num_prompts, f"{num_prompts} prompts or more", got, str(path))
    random.Random(seed).shuffle(prompts)
    chosen = tuple(prompts[:num_prompts])
    facts: dict[str, Scalar] = {"dataset": name, "dataset_file": path.name}
    if len(lengths := {prompt.output_len for prompt in chosen}) == 1:
        facts["output_len"] = lengths.pop()
    return DataSet(prompts=chosen, seed=seed, facts=facts)


def make_image_prompts(asked: ImageRequests) -> list[ImagePrompt]:
    """The prompts that were asked for; ConfigError if a data set has too few."""
    if asked.dataset_path is not None:
        from octavo.calibration.data import open_images

        data = open_images(asked.dataset_path, split=asked.hf_split, subset=asked.hf_subset)
        prompts = [ImagePrompt(QUESTION, tuple(found)) for found in data.prompts(asked.num_prompts)]
        wanted = f"{asked.num_prompts} prompts in {asked.dataset_path}"
        expect(len(prompts) >= asked.num_prompts, wanted, f"{len(prompts)}: ask for fewer")
        return prompts
    import numpy as np
    from PIL import Image

    buckets = parse_buckets(asked.bucket_config)
    chooser, pixels = random.Random(asked.seed), np.random.default_rng(asked.seed)
    prompts = []
    for _ in range(asked.num_prompts):
        sizes = chooser.choices(
            list(buckets), list(buckets.values()), k=asked.base_items_per_request
        )
        images = tuple(
            Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8))
            for height, width, _ in sizes
        )
        letters = chooser.choices("abcdefghijklmnopqrstuvwxyz ", k=asked.random_input_len)
        prompts.append(ImagePrompt("".join(letters), images))
    return prompts


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """When a request was sent, and when each part of its answer came, in seconds of one clock.

    output_len: tokens of the answer; parts may be fewer, where one has several. error: why there is
    no whole answer; None if there is. queue_s: how long it waited here before it was sent. text:
    the answer, where it was read.
    """

    input_len: int
    output_len: int
    start_s: float
    parts_s: tuple[float, ...]
    error: str | None = None
    queue_s: float = 0.0
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """From the request to the first part."""
        return self.parts_s[0] - self.start_s

    @property
    def itls_s(self) -> list[float]:
        """Between one part and the next."""
        return [end - start for start, end in itertools.pairwise(self.parts_s)]

    @property
    def latency_s(self) -> float:
        """From the request to the last part."""
        return self.parts_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds of each token after the first; None if there is no other."""
        if self.output_len < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)


def summarize(
    requests: Sequence[RequestTimes], duration_s: float, percentiles: Sequence[float] = (99.0,)
) -> dict[str, float]:
    """Throughput and latency of all requests, by vLLM's names; failed ones count only as such."""
    done = [one for one in requests if one.error is None]
    num_input, num_output = sum(one.input_len for one in done), sum(one.output_len for one in done)
    # At the same time, ends come first.
    changes = sorted([(one.start_s, 1) for one in done] + [(one.parts_s[-1], -1) for one in done])
    num_open = itertools.accumulate(change for _, change in changes)
    result: dict[str, float] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _peak_rate(done),
        "max_concurrent_requests": max(num_open, default=0),
    }
    samples = {
        "ttft": [one.ttft_s for one in done],
        "tpot": [tpot for one in done if (tpot := one.tpot_s) is not None],
        "itl": [itl for one in done for itl in one.itls_s],
        "e2el": [one.latency_s for one in done],
    }
    for metric in METRICS:
        result |= statistics_ms(metric, samples[metric], percentiles)
    return result


def goodput(
    requests: Sequence[RequestTimes], duration_s: float, limits_ms: Mapping[str, float]
) -> float:
    """Requests per second that met all limits: of ttft, tpot or e2el, in milliseconds.

    TPOT of an answer of one token is 0, as in vLLM.
    """
    expect_one_of("limits", GOODPUT_METRICS, *limits_ms)

    def is_good(one: RequestTimes) -> bool:
        times_s = {"ttft": one.ttft_s, "tpot": one.tpot_s or 0.0, "e2el": one.latency_s}
        return all(times_s[name] * 1e3 <= limit for name, limit in limits_ms.items())

    return sum(one.error is None and is_good(one) for one in requests) / duration_s


def statistics_ms(
    metric: str, samples_s: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    """vLLM's {mean,median,std,pNN}_METRIC_ms; NaN, and not vLLM's 0, where there is no sample."""
    samples_ms = [1e3 * sample for sample in samples_s or [math.nan]]
    found = spread(samples_ms, {f"p{p:g}": p for p in percentiles})
    return {f"{name}_{metric}_ms": value for name, value in found.items()}


def spread(values: Sequence[float], percentiles: Mapping[str, float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles, these by their names."""
    import numpy as np

    found = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    found |= {name: np.percentile(values, p) for name, p in percentiles.items()}
    return {name: float(value) for name, value in found.items()}


def _peak_rate(requests: Sequence[RequestTimes]) -> float:
    """The most tokens that came within one second of the clock of the run."""
    if not requests:
        return 0.0
    first = min(one.start_s for one in requests)
    counts: dict[int, float] = defaultdict(float)
    for one in requests:
        for part in one.parts_s:
            counts[int(part - first)] += one.output_len / len(one.parts_s)
    return round(max(counts.values()), 6)  # shares of a token add up to a last bit more or less

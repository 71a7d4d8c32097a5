"""What benchmarks run: prompts and how they come, sizes and counts. Settings alone, no torch.

The entries under `Attributes:` are also the help of the flags that commands make of the fields.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from octavo.errors import ConfigError
from octavo.measure.bench.expect import expect, expect_one_of, expect_percentiles
from octavo.measure.bench.requests import (
    GOODPUT_METRICS,
    DataSet,
    ImageRequests,
    Prompt,
    custom_data,
    random_mm_data,
    sharegpt_data,
)
from octavo.measure.records import Scalar

# By vLLM's names.
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
RAMPS = ("linear", "exponential")
# Of an image, before it is rounded to whole patches: height and width.
RESOLUTIONS: Mapping[str, tuple[int, int]] = {
    "hd": (720, 1280),
    "fullhd": (1080, 1920),
    "qhd": (1440, 2560),
    "4k": (2160, 3840),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Random prompts; the same seed draws the same ones.

    Attributes:
        num_prompts: Requests.
        input_len: Tokens of a prompt.
        output_len: Tokens of an answer.
        range_ratio: Lengths are drawn evenly from LENGTH · (1 ± this): 0.15.
        seed: Of random prompts.
    """

    num_prompts: int = 48
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_prompts, self.input_len, self.output_len)
        expect(min(counts) >= 1, "prompts, inputs and outputs of at least 1", self)
        expect(0 <= self.range_ratio < 1, "a range ratio in [0, 1)", self.range_ratio)

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        return {own.name: getattr(self, own.name) for own in fields(Workload)}

    @property
    def max_context(self) -> int:
        """The most tokens that a prompt and its answer can have together."""
        return self._range(self.input_len)[1] + self._range(self.output_len)[1]

    def within(self, context: int | None) -> Self:
        """The load with prompts that are short enough for this context; None is any."""
        if context is None or self.max_context <= context:
            return self
        room = context - self._range(self.output_len)[1]
        return replace(self, input_len=max(1, int(room / (1 + self.range_ratio))))

    def draw(self, vocab_size: int) -> list[Prompt]:
        """The prompts, of tokens below vocab_size."""
        import numpy as np

        expect(vocab_size >= 2, "a vocabulary of 2 tokens or more", vocab_size)
        random = np.random.default_rng(self.seed)
        sizes = [
            random.integers(*self._range(length), self.num_prompts, endpoint=True)
            for length in (self.input_len, self.output_len)
        ]
        return [
            Prompt(int(outputs), tuple(random.integers(0, vocab_size, inputs).tolist()))
            for inputs, outputs in zip(*sizes, strict=True)
        ]

    def _range(self, length: int) -> tuple[int, int]:
        low, high = length * (1 - self.range_ratio), length * (1 + self.range_ratio)
        return max(1, math.floor(low)), math.ceil(high)


@dataclass(frozen=True, kw_only=True)
class LatencyCase:
    """So many sequences of each length at once, so many times.

    Attributes:
        input_lens: Tokens of a prompt.
        output_len: Tokens of an answer.
        batch_size: Sequences at once.
        num_iters: Batches of each length.
        num_warmups: Batches before, with short answers.
        seed: Of random prompts.
    """

    input_lens: tuple[int, ...] = (64, 512)
    output_len: int = 128
    batch_size: int = 1
    num_iters: int = 3
    num_warmups: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (*self.input_lens, self.batch_size, self.num_iters, self.num_warmups + 1)
        is_right = bool(self.input_lens) and min(counts) >= 1
        expect(is_right, "lengths and counts of at least 1", self)
        expect(self.output_len > 1, "2 or more tokens, to have time between them", self.output_len)
        lengths = list(self.input_lens)
        expect(len(set(lengths)) == len(lengths), "different lengths", lengths)

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it, beside the length."""
        return {"batch_size": self.batch_size, "output_len": self.output_len, "seed": self.seed}

    @property
    def num_runs(self) -> int:
        """How many batches a row runs."""
        return len(self.input_lens) * (self.num_iters + self.num_warmups)

    @property
    def max_context(self) -> int:
        """The most tokens that a prompt and its answer have together."""
        return max(self.input_lens) + self.output_len

    def workload(self, input_len: int) -> Workload:
        """The prompts of a length."""
        sizes = {"input_len": input_len, "output_len": self.output_len}
        return Workload(num_prompts=self.batch_size, seed=self.seed, **sizes)

    def within(self, context: int | None) -> "LatencyCase":
        """The case without lengths that do not fit this context; None is any."""
        if context is None:
            return self
        longest = max(1, context - self.output_len)
        fitting = tuple(length for length in self.input_lens if length <= longest)
        return replace(self, input_lens=fitting or (longest,))


@dataclass(frozen=True, kw_only=True)
class ThroughputCase(Workload):
    """A load, and how many of its requests are open at once.

    Attributes:
        max_concurrency: Requests open at once: the next comes when one has ended. Left out, all
            come at once.
        num_warmups: Requests before, the first of the load with short answers; left out,
            --max-concurrency, 8 at most.
    """

    max_concurrency: int | None = None
    num_warmups: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        limit, num_warmups = self.max_concurrency, self.num_warmups
        is_right = (limit is None or limit >= 1) and (num_warmups or 0) >= 0
        wanted = "0 or more warm-ups and 1 or more open requests"
        expect(is_right, wanted, f"{num_warmups} and {limit}")

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        limit = self.max_concurrency
        return super().about | ({} if limit is None else {"max_concurrency": limit})


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Where prompts come from; names are vLLM's.

    Attributes:
        dataset_name: Where prompts come from: random (tokens), sharegpt (a JSON file in its form),
            custom (JSON Lines of {"prompt": "…", "output_tokens": 128}), or random-mm (letters
            with random images, for chat).
        dataset_path: The file of sharegpt or custom.
        sharegpt_output_len: Tokens of an answer; left out, those of the file's, counted by
            --tokenizer.
        custom_output_len: Tokens of an answer; left out, each row's output_tokens.
        tokenizer: Folder or hub name; counts tokens of sharegpt, of which vLLM's limits then hold.
        base_items_per_request: Images of a prompt.
        bucket_config: Sizes of images and their shares: {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}.
    """

    dataset_name: str = "random"
    dataset_path: Path | None = None
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = None
    tokenizer: str | None = None
    base_items_per_request: int = 1
    bucket_config: str | None = None

    def __post_init__(self) -> None:
        name, path = self.dataset_name, self.dataset_path
        expect_one_of("a data set", ("random", "sharegpt", "custom", "random-mm"), name)
        owned = {
            "--sharegpt-output-len": (self.sharegpt_output_len, "sharegpt"),
            "--tokenizer": (self.tokenizer, "sharegpt"),
            "--custom-output-len": (self.custom_output_len, "custom"),
            "--random-mm-bucket-config": (self.bucket_config, "random-mm"),
        }
        for flag, (value, owner) in owned.items():
            if value is not None and owner != name:
                raise ConfigError(f"{flag} is for --dataset-name {owner}, got {name}")
        lengths = [n for n in (self.sharegpt_output_len, self.custom_output_len) if n is not None]
        expect(min(lengths, default=1) >= 1, "answers of at least 1 token", lengths)
        is_right = (path is not None) == (name in ("sharegpt", "custom"))
        wanted = "a --dataset-path for sharegpt and custom alone"
        expect(is_right, wanted, f"{path} for {name}")

    def open(self, random: Workload) -> Workload | DataSet:
        """The prompts; random: what is asked of random ones, and how many."""
        path, count, seed = self.dataset_path, random.num_prompts, random.seed
        if self.dataset_name == "random-mm":
            asked = ImageRequests(
                num_prompts=count,
                random_input_len=random.input_len,
                base_items_per_request=self.base_items_per_request,
                bucket_config=self.bucket_config,
                seed=seed,
            )
            return random_mm_data(asked, output_len=random.output_len)
        if path is None:
            return random
        if self.dataset_name == "custom":
            return custom_data(path, count, output_len=self.custom_output_len, seed=seed)
        tokenizer: Any = None
        if self.tokenizer is not None:
            from octavo.integrations.transformers.text_model import load_tokenizer

            tokenizer = load_tokenizer(self.tokenizer)
        counter = None if tokenizer is None else (lambda text: len(tokenizer(text).input_ids))
        length = self.sharegpt_output_len
        return sharegpt_data(path, count, output_len=length, count_tokens=counter, seed=seed)


@dataclass(frozen=True, kw_only=True)
class ServingCase:
    """A load, where it goes, and how it comes.

    Attributes:
        base_url: Of a server that runs: http://localhost:8000.
        workload: Random tokens, or the prompts of a data set.
        backend: openai (completions) or openai-chat, which takes texts and images.
        model: What requests call the model; left out, the first that the server names.
        api_key: That the server wants; OCTAVO_API_KEY does the same.
        request_rate: Requests per second; inf is all at once.
        ramp_up_strategy: linear or exponential: a rate that changes from the first request to the
            last, in place of --request-rate.
        ramp_up_start_rps: Requests per second at the start.
        ramp_up_end_rps: Requests per second at the end.
        burstiness: 1 is a Poisson process, less comes in bursts, more is steadier.
        max_concurrency: Requests open at once; others wait here, and their clock with them. Left
            out, all that have come.
        num_warmups: Requests before, one after the other.
        ignore_eos: Whether answers have the length that was asked for; servers other than octavo's
            and vLLM's may refuse it.
        vocab_size: Random tokens are below this.
        timeout_s: Seconds between two parts of an answer.
        percentiles: Of latencies.
        goodput_ms: The limits of a request that counts as good.
    """

    base_url: str = "http://localhost"
    workload: Workload | DataSet = field(default_factory=Workload)
    backend: str = "openai"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    request_rate: float = math.inf
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    ignore_eos: bool = True
    vocab_size: int = 1000
    timeout_s: float = 600.0
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_url = self.base_url.startswith(("http://", "https://"))
        expect(is_url, "a URL such as http://localhost:8000", self.base_url)
        rates = (self.request_rate, self.burstiness)
        expect(all(r > 0 for r in rates), "a request rate and a burstiness above 0", rates)
        limit, num_warmups = self.max_concurrency, self.num_warmups
        is_right = (limit is None or limit >= 1) and num_warmups >= 0
        wanted = "1 or more requests at once and 0 or more warm-ups"
        expect(is_right, wanted, f"{limit} and {num_warmups}")
        expect_percentiles(self.percentiles)
        expect_one_of("a backend", ENDPOINTS, self.backend)
        if isinstance(self.workload, Workload):
            if self.backend != "openai":
                raise ConfigError(
                    "random prompts are tokens, which chat does not take: backend openai"
                )
        elif self.backend == "openai" and any(one.images for one in self.workload.prompts):
            raise ConfigError("completions take no images: backend openai-chat")
        given = [value for value in self.ramp if value is not None]
        if len(given) in (1, 2):
            flags = "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
            raise ConfigError(f"a ramp needs {flags}, got {given}")
        if given:
            strategy, *ends = given
            expect_one_of("a ramp", RAMPS, strategy)
            is_right = all(0 < end < math.inf for end in ends)
            expect(is_right, "rates above 0 to ramp between", " and ".join(map(str, ends)))
            is_one = math.isinf(self.request_rate)
            expect(is_one, "a request rate or a ramp", f"{self.request_rate} as well")
        limits = self.goodput_ms
        is_right = all(name in GOODPUT_METRICS and ms > 0 for name, ms in limits.items())
        expect(is_right, f"limits above 0 ms of {', '.join(GOODPUT_METRICS)}", dict(limits))

    @property
    def ramp(self) -> tuple[Any, Any, Any]:
        """How the rate changes, from what, and to what; or three times None."""
        return self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps

    def delays_s(self) -> list[float]:
        """When each request comes, in seconds after the first; by vLLM's gamma distribution."""
        import numpy as np

        count, (strategy, start, end) = self.workload.num_prompts, self.ramp
        rates: Any = self.request_rate
        if strategy is not None:
            spaced = np.linspace if strategy == "linear" else np.geomspace
            rates = spaced(start, end, count - 1)
        elif math.isinf(rates):
            return [0.0] * count
        random = np.random.default_rng(self.workload.seed)
        gaps = random.gamma(self.burstiness, 1 / (rates * self.burstiness), count - 1)
        return [0.0, *np.cumsum(gaps).tolist()]


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Limits from ttft:200,tpot:50 and so on."""
    found: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, _, limit = part.partition(":")
        try:
            value = float(limit)
        except ValueError:
            raise ConfigError(f"expected --goodput such as ttft:200, got {part!r}") from None
        expect(name not in found, f"one limit of {name}", "two")
        found[name] = value
    return found

"""What benchmarks run: prompts and how they come, sizes and counts. Settings alone, no torch.

The entries under `Attributes:` are also the help of the flags that commands make of the fields.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.measure.bench.requests import (
    GOODPUT_METRICS,
    DataSet,
    ImageRequests,
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


@dataclass(frozen=True)
class RandomPrompt:
    """A prompt, and how many tokens answer it."""

    tokens: tuple[int, ...]
    output_len: int


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
        if min(self.num_prompts, self.input_len, self.output_len) < 1:
            raise ConfigError(f"expected prompts, inputs and outputs of at least 1, got {self}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"expected a range ratio in [0, 1), got {self.range_ratio}")

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        return asdict(self)

    @property
    def max_context(self) -> int:
        """The most tokens that a prompt and its answer can have together."""
        return self._range(self.input_len)[1] + self._range(self.output_len)[1]

    def within(self, context: int | None) -> "Workload":
        """The load with prompts that are short enough for this context; None is any."""
        if context is None or self.max_context <= context:
            return self
        room = context - self._range(self.output_len)[1]
        return replace(self, input_len=max(1, int(room / (1 + self.range_ratio))))

    def draw(self, vocab_size: int) -> list[RandomPrompt]:
        """The prompts, of tokens below vocab_size."""
        import numpy as np

        if vocab_size < 2:
            raise ConfigError(f"expected a vocabulary of 2 tokens or more, got {vocab_size}")
        random = np.random.default_rng(self.seed)
        sizes = [
            random.integers(*self._range(length), self.num_prompts, endpoint=True)
            for length in (self.input_len, self.output_len)
        ]
        return [
            RandomPrompt(tuple(random.integers(0, vocab_size, inputs).tolist()), int(outputs))
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
        counts = (*self.input_lens, self.batch_size, self.num_iters)
        if not self.input_lens or min(counts) < 1 or self.num_warmups < 0:
            raise ConfigError(f"expected lengths and counts of at least 1, got {self}")
        if self.output_len < 2:
            raise ConfigError(
                f"expected 2 or more tokens, to have time between them, got {self.output_len}"
            )
        if len(set(self.input_lens)) != len(self.input_lens):
            raise ConfigError(f"expected different lengths, got {list(self.input_lens)}")

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

    def num_seqs(self, limit: int) -> int:
        """How many requests the engine runs at once."""
        return self.batch_size


@dataclass(frozen=True, kw_only=True)
class ThroughputCase:
    """A load, and how many of its requests are open at once.

    Attributes:
        workload: The prompts.
        max_concurrency: Requests open at once: the next comes when one has ended. Left out, all
            come at once.
        num_warmups: Requests before, the first of the load with short answers; left out,
            --max-concurrency, 8 at most.
    """

    workload: Workload = field(default_factory=Workload)
    max_concurrency: int | None = None
    num_warmups: int | None = None

    def __post_init__(self) -> None:
        if (self.num_warmups or 0) < 0 or (
            self.max_concurrency is not None and self.max_concurrency < 1
        ):
            raise ConfigError(
                f"expected 0 or more warm-ups and 1 or more open requests, got {self.num_warmups} "
                f"and {self.max_concurrency}"
            )

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        limit = self.max_concurrency
        return self.workload.about | ({} if limit is None else {"max_concurrency": limit})

    @property
    def max_context(self) -> int:
        """The most tokens that a prompt and its answer can have together."""
        return self.workload.max_context

    def num_seqs(self, limit: int) -> int:
        """How many requests the engine runs at once; limit: how many it may."""
        return min(self.max_concurrency or limit, limit, self.workload.num_prompts)


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
        if name not in ("random", "sharegpt", "custom", "random-mm"):
            raise ConfigError(
                f"expected a data set of random, sharegpt, custom, random-mm; got {name!r}"
            )
        owned = {
            "--sharegpt-output-len": (self.sharegpt_output_len, "sharegpt"),
            "--tokenizer": (self.tokenizer, "sharegpt"),
            "--custom-output-len": (self.custom_output_len, "custom"),
            "--random-mm-bucket-config": (self.bucket_config, "random-mm"),
        }
        for flag, (value, owner) in owned.items():
            if value is not None and owner != name:
                raise ConfigError(f"{flag} is for --dataset-name {owner}, got {name}")
        if any(n is not None and n < 1 for n in (self.sharegpt_output_len, self.custom_output_len)):
            raise ConfigError("expected answers of at least 1 token")
        if (path is not None) != (name in ("sharegpt", "custom")):
            raise ConfigError(
                f"expected a --dataset-path for sharegpt and custom alone, got {path} for {name}"
            )

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
        counter: Callable[[str], int] | None = None
        if self.tokenizer is not None:
            from octavo.integrations.transformers.text_model import load_tokenizer

            tokenizer = load_tokenizer(self.tokenizer)

            def counter(text: str) -> int:
                return len(tokenizer(text).input_ids)

        length = self.sharegpt_output_len
        return sharegpt_data(path, count, output_len=length, count_tokens=counter, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A request rate that grows (or falls) from the first request to the last; or none at all.

    Attributes:
        strategy: linear or exponential: a rate that changes from the first request to the last.
        start_rps: Requests per second at the start.
        end_rps: Requests per second at the end.
    """

    strategy: str | None = None
    start_rps: float | None = None
    end_rps: float | None = None

    def __post_init__(self) -> None:
        strategy, start, end = self.strategy, self.start_rps, self.end_rps
        if strategy is None and start is None and end is None:
            return
        if strategy is None or start is None or end is None:
            raise ConfigError(
                "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps, got "
                f"{strategy}, {start} and {end}"
            )
        if strategy not in RAMPS:
            raise ConfigError(f"expected a ramp of {', '.join(RAMPS)}; got {strategy!r}")
        if not (0 < start < math.inf and 0 < end < math.inf):
            raise ConfigError(f"expected rates above 0 to ramp between, got {start} and {end}")

    def __bool__(self) -> bool:
        return self.strategy is not None

    def rates(self, count: int) -> Any:
        """Requests per second at each of so many gaps."""
        import numpy as np

        spaced: Any = np.linspace if self.strategy == "linear" else np.geomspace
        return spaced(self.start_rps, self.end_rps, count)


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
        ramp: In place of that rate, one that changes.
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
    ramp: Ramp = field(default_factory=Ramp)
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    ignore_eos: bool = True
    vocab_size: int = 1000
    timeout_s: float = 600.0
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"expected a URL such as http://localhost:8000, got {self.base_url}")
        if not self.request_rate > 0 or not self.burstiness > 0:
            raise ConfigError(
                f"expected a request rate and a burstiness above 0, got {self.request_rate} and "
                f"{self.burstiness}"
            )
        if (self.max_concurrency is not None and self.max_concurrency < 1) or self.num_warmups < 0:
            raise ConfigError(
                f"expected 1 or more requests at once and 0 or more warm-ups, got "
                f"{self.max_concurrency} and {self.num_warmups}"
            )
        if not self.percentiles or not all(0 <= p <= 100 for p in self.percentiles):
            raise ConfigError(f"expected percentiles of 0 to 100, got {list(self.percentiles)}")
        self._check_kinds()

    def _check_kinds(self) -> None:
        if self.backend not in ENDPOINTS:
            raise ConfigError(f"expected a backend of {', '.join(ENDPOINTS)}; got {self.backend!r}")
        if isinstance(self.workload, Workload):
            if self.backend != "openai":
                raise ConfigError(
                    "random prompts are tokens, which chat does not take: backend openai"
                )
        elif self.workload.has_images and self.backend == "openai":
            raise ConfigError("completions take no images: backend openai-chat")
        if self.ramp and not math.isinf(self.request_rate):
            raise ConfigError(f"expected a request rate or a ramp, got {self.request_rate} as well")
        limits = self.goodput_ms.items()
        if not all(name in GOODPUT_METRICS and ms > 0 for name, ms in limits):
            raise ConfigError(
                f"expected limits above 0 ms of {', '.join(GOODPUT_METRICS)}, got {dict(limits)}"
            )

    def delays_s(self) -> list[float]:
        """When each request comes, in seconds after the first; by vLLM's gamma distribution."""
        import numpy as np

        count = self.workload.num_prompts
        if not self.ramp and math.isinf(self.request_rate):
            return [0.0] * count
        random = np.random.default_rng(self.workload.seed)
        rates = self.ramp.rates(count - 1) if self.ramp else self.request_rate
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
        if name in found:
            raise ConfigError(f"expected one limit of {name}, got two")
        found[name] = value
    return found

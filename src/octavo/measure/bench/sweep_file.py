"""The TOML file of a sweep: one model, recipes, and the workloads that each of them runs.

    config = "llama-3.1-8b"
    recipes = ["auto", "fp8"]

    [[latency]]
    input_len = [256, "4k", "32k", "125k"]

    [[throughput]]
    num_prompts = 48
    input_len = 20000
    output_len = 2000
    max_concurrency = 8

Keys are the flags of `octavo bench latency` and `octavo bench throughput`, with underscores.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.measure.advise.memory import parse_tokens
from octavo.measure.bench.engine_rows import check_rows
from octavo.measure.bench.latency import LatencyCase
from octavo.measure.bench.request_times import Workload
from octavo.measure.bench.throughput import ThroughputCase
from octavo.serving.engine.settings import EngineSettings
from octavo.settings import Settings

Tokens = int | str  # 4096, or "4k"


def _tokens(value: Tokens) -> int:
    return parse_tokens(str(value))


class LatencyLoad(Settings):
    """One batch by itself, at each of these lengths."""

    input_len: tuple[Tokens, ...]
    output_len: int = 128
    batch_size: int = 1
    num_iters: int = 3
    num_iters_warmup: int = 1
    seed: int = 0

    @property
    def case(self) -> LatencyCase:
        """What runs."""
        return LatencyCase(
            input_lens=tuple(map(_tokens, self.input_len)),
            output_len=self.output_len,
            batch_size=self.batch_size,
            num_iters=self.num_iters,
            num_warmups=self.num_iters_warmup,
            seed=self.seed,
        )

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once."""
        return self.batch_size

    def flags(self) -> dict[str, Any]:
        """Those of octavo bench latency."""
        case = self.case
        return {
            "--input-len": ",".join(map(str, case.input_lens)),
            "--output-len": case.output_len,
            "--batch-size": case.batch_size,
            "--num-iters": case.num_iters,
            "--num-iters-warmup": case.num_warmups,
            "--seed": case.seed,
        }


class ThroughputLoad(Settings):
    """Many requests, so many of them open at once."""

    input_len: Tokens
    output_len: Tokens
    num_prompts: int = 48
    range_ratio: float = 0.0
    max_concurrency: int | None = None
    num_warmups: int | None = None
    max_num_seqs: int = 256
    seed: int = 0

    @property
    def case(self) -> ThroughputCase:
        """What runs."""
        work = Workload(
            num_prompts=self.num_prompts,
            input_len=_tokens(self.input_len),
            output_len=_tokens(self.output_len),
            range_ratio=self.range_ratio,
            seed=self.seed,
        )
        return ThroughputCase(
            workload=work, max_concurrency=self.max_concurrency, num_warmups=self.num_warmups
        )

    def flags(self) -> dict[str, Any]:
        """Those of octavo bench throughput."""
        work = self.case.workload
        return {
            "--num-prompts": work.num_prompts,
            "--input-len": work.input_len,
            "--output-len": work.output_len,
            "--range-ratio": work.range_ratio,
            "--max-concurrency": self.max_concurrency,
            "--num-warmups": self.num_warmups,
            "--max-num-seqs": self.max_num_seqs,
            "--seed": work.seed,
        }


class EngineOptions(Settings):
    """What all combinations have in common."""

    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    num_pages: int | None = None
    page_size: int = 64
    enforce_eager: bool = False
    compile: bool = False

    def settings(self, max_num_seqs: int) -> EngineSettings:
        """Those of an engine for so many requests at once."""
        return EngineSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            memory_fraction=self.gpu_memory_utilization,
            num_pages=self.num_pages,
            page_size=self.page_size,
            cuda_graphs=False if self.enforce_eager else None,
            compile=self.compile,
        )

    def flags(self) -> dict[str, Any]:
        """By the names of the command line."""
        return {f"--{name.replace('_', '-')}": value for name, value in self}


class SweepFile(Settings):
    """A model (or the config of one with random weights), recipes, and workloads.

    The first recipe is what the others are compared with.
    """

    model: str | None = None
    config: str | None = None
    layers: int | None = None
    dtype: str = "auto"
    recipes: tuple[str, ...]
    skip_layers: tuple[str, ...] = ()
    engine: EngineOptions = EngineOptions()
    latency: tuple[LatencyLoad, ...] = ()
    throughput: tuple[ThroughputLoad, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SweepFile":
        """The sweep in a TOML file; ConfigError for whatever could not run."""
        try:
            document = tomllib.loads(Path(path).read_text("utf-8"))
            found = cls(**document)
            found.check()
        except (OSError, ValueError) as error:  # a ConfigError is a ValueError
            raise ConfigError(f"{os.fspath(path)}: {error}") from None
        return found

    @property
    def loads(self) -> tuple[LatencyLoad | ThroughputLoad, ...]:
        """All workloads, in the order they run."""
        return (*self.latency, *self.throughput)

    def check(self) -> None:
        """Raise ConfigError before a model is loaded for it."""
        if (self.model is None) == (self.config is None):
            raise ConfigError(
                f"expected a model or a config, got {self.model} and {self.config}; "
                'such as config = "tiny"'
            )
        if not self.recipes or len(set(self.recipes)) != len(self.recipes):
            raise ConfigError(f"expected different recipes, got {list(self.recipes)}")
        if not self.loads:
            raise ConfigError("expected one or more workloads: [[latency]] or [[throughput]]")
        cases = [load.case for load in self.loads]
        if any(case in cases[:number] for number, case in enumerate(cases)):
            raise ConfigError("expected different workloads, got one twice")
        self.engine.settings(1)
        check_rows(self.recipes, self.skip_layers)

    def flags(self) -> Mapping[str, Any]:
        """Those that all combinations share, beside the recipe's."""
        return {
            "--config": self.config,
            "--kv-cache-dtype-skip-layers": self.skip_layers,
            "--layers": self.layers,
            "--dtype": self.dtype,
            **self.engine.flags(),
        }

"""What evaluations are asked for. Settings alone, no torch: commands make flags of the fields.

A flag is the field's name with hyphens, and its entry under `Attributes:` is the flag's help.
"""

import re
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from octavo.errors import ConfigError
from octavo.integrations.transformers.tokenizer import PromptSettings
from octavo.measure.records import Scalar
from octavo.measure.rows import LANGUAGE, Row, parse_rows
from octavo.measure.run import command_line

GENERATED, BASELINE = "generated", "baseline"
# Scales of 1.0 are what needs no calibration, and what vLLM's --kv-cache-dtype fp8 runs.
DEFAULT_ROWS = (BASELINE, "unit", "tensor", "head", "token")
# Of the retrieval model, which needs no calibration. One-level sums take minutes on a CPU.
RETRIEVAL_ROWS, CPU_ROWS = (BASELINE, "unit+promote=none", "unit"), (BASELINE, "unit")
Count = Literal["later", "all", "last"]
Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """An evaluation of a model.

    task: the command's name. unsaid: fields that the command line of a record leaves out.
    """

    task: ClassVar[str]
    unsaid: ClassVar[Names] = ()

    model: str | None = None

    @property
    def command(self) -> str:
        """The command line that repeats this."""
        said, words = self.said(), []
        if isinstance(said.get("prompts"), PromptSettings):
            words = said.pop("prompts").command
        flags = {f"--{name.replace('_', '-')}": value for name, value in said.items()}
        return command_line("octavo", "eval", self.task, self.model, *words, flags=flags)

    def said(self) -> dict[str, Any]:
        """The fields that the command line says."""
        names = [own.name for own in fields(self) if own.name not in ("model", *self.unsaid)]
        return {name: getattr(self, name) for name in names}


def check_least(request: Request, **least: int) -> None:
    """ConfigError for a field that is below its least value."""
    for name, number in least.items():
        if (value := getattr(request, name)) is not None and value < number:
            flag = name.replace("_", "-")
            raise ConfigError(f"expected --{flag} of {number} or more, got {value}")


@dataclass(frozen=True, kw_only=True)
class LanguageRequest(Request):
    """Rows of a language model that are compared.

    Attributes:
        recipe: A row of the table, see docs/reference/rows.md; may be given more than once.
        kv_cache_dtype: Of the rows in FP8: fp8 (e4m3) or fp8_e5m2.
        scales: Scale file for rows with static scales or +center, found on keys such as theirs;
            left out, scales are calibrated first, for every kind of keys among the rows: on other
            windows of the text, other haystacks, or generated chats.
        margin: Headroom of calibrated scales.
        dtype: The model runs in this: its own, or such as bfloat16.
        chunk: Tokens of one pass over a prompt: a prefill.
    """

    recipe: tuple[str, ...] = ()
    kv_cache_dtype: str = "fp8"
    scales: Path | None = None
    margin: float = 1.5
    dtype: str = "auto"
    chunk: int | None = None
    prompts: PromptSettings = PromptSettings()

    def __post_init__(self) -> None:
        # Names are checked before a model is loaded.
        if not self.rows_with_scales and self.scales is not None:
            raise ConfigError(
                "--scales is for rows with static scales or centered keys, which are not asked for"
            )

    @property
    def row_names(self) -> tuple[str, ...]:
        """The rows of a local model."""
        return self.recipe or DEFAULT_ROWS

    @cached_property
    def parsed_rows(self) -> list[Row]:
        """The rows of a local model, by the names that were asked for."""
        return parse_rows(self.row_names, LANGUAGE, kv_cache_dtype=self.kv_cache_dtype)

    @property
    def rows_with_scales(self) -> list[Row]:
        """The rows that need scales of a KV cache, or the means of keys."""
        return [row for row in self.parsed_rows if row.needs_scales and row.kv_cache is not None]

    def said(self) -> dict[str, Any]:
        """What is asked, and then who answers, with the rows that were left out."""
        found = super().said() | {"recipe": self.row_names}
        who = [own.name for own in fields(ServedRequest)]
        return dict(sorted(found.items(), key=lambda item: item[0] in who))


@dataclass(frozen=True, kw_only=True)
class PerplexityRequest(LanguageRequest):
    """A text that is read through the KV cache, in windows. model: None is SmolLM2-135M-Instruct.

    Attributes:
        chunk: Tokens of one pass. The first chunk of a window fills the cache, later ones attend to
            what it holds. 1 to 4 are decoding: queries are never quantized. More are a prefill,
            where an e4m3 cache quantizes queries as well. Left out, 512, or half of a shorter
            --context.
        data: The text: any file in UTF-8.
        context: Tokens of a window; left out, 8192 or the most that the model was made for.
        num_windows: How many, from the text's start; none overlap.
        batch_size: Windows that are read side by side.
        count: Which predictions count: those of all chunks but the first, all, or the last chunk's
            alone.
        calibration_data: The text that scales are calibrated on; left out, the windows of --data
            right after those measured.
        calibration_windows: How many windows for that.
    """

    task = "perplexity"

    data: Path | None = None
    context: int | None = None
    num_windows: int = 4
    batch_size: int = 1
    count: Count = "later"
    calibration_data: Path | None = None
    calibration_windows: int = 4

    def __post_init__(self) -> None:
        if self.data is None:
            raise ConfigError("expected a text to read, got none: --data FILE, any file in UTF-8")
        super().__post_init__()
        check_least(self, context=2, num_windows=1, calibration_windows=1, chunk=1, batch_size=1)
        if self.scales is not None and self.calibration_data is not None:
            raise ConfigError("expected --scales or --calibration-data, got both")


@dataclass(frozen=True, kw_only=True)
class ServedRequest(LanguageRequest):
    """Rows of a local model, or servers in its place.

    Attributes:
        endpoint: URL or NAME=URL of a server with OpenAI's API, in place of a model; may be given
            more than once, a row each.
        tokenizer: Folder or name of the tokenizer of the servers' model, which counts tokens. Of
            needles: left out, servers get the words of the retrieval model.
        served_model_name: The model to ask the servers for.
        api_key: That the servers want; OCTAVO_API_KEY does the same.
        max_concurrency: Requests open at once.
        resume: Leave out what --output has records of already.
    """

    unsaid: ClassVar[Names] = ("api_key", "max_concurrency", "resume", "served_model_name")

    endpoint: tuple[str, ...] = ()
    tokenizer: str | None = None
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_concurrency: int = 4
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.endpoint and (self.served_model_name or self.api_key):
            raise ConfigError(
                "--served-model-name and --api-key are for --endpoint, which is missing"
            )
        if self.endpoint and self.model:
            raise ConfigError("expected a MODEL or --endpoint, one of them")
        if self.endpoint and self.recipe:
            raise ConfigError("--recipe is for a model; a server runs what it was started with")
        if self.tokenizer and not self.endpoint:
            raise ConfigError("--tokenizer is for --endpoint: a model has its own")
        check_least(self, max_concurrency=1)
        super().__post_init__()

    @property
    def rows_with_scales(self) -> list[Row]:
        """Those of a local model; a server has its own."""
        return [] if self.endpoint else super().rows_with_scales

    def said(self) -> dict[str, Any]:
        """All fields, without those of a local model where servers take its place."""
        local = ("recipe", "kv_cache_dtype", "scales", "margin", "dtype", "chunk")
        found = super().said()
        return {name: found[name] for name in found if not self.endpoint or name not in local}


@dataclass(frozen=True, kw_only=True)
class NeedleRequest(ServedRequest):
    """Needles that are searched in haystacks. model: None is the retrieval model.

    Attributes:
        lengths: Tokens of a prompt, with commas between, such as 4k,32k,128k. Left out: of the
            retrieval model 8k to 128k on a GPU and 512 to 2k elsewhere, of others 1k to 8k, as far
            as the model's context goes.
        depths: Where the needle is, from 0, the start, to 1: with commas between.
        repetitions: Prompts of each length and depth.
        data: A text to hide needles in, any file in UTF-8; left out, sentences are made up.
        num_keys: Keys with values in a prompt of text.
        seed: Of the prompts.
    """

    task = "needle"

    chunk: int | None = 2048
    lengths: str | None = None
    depths: str = "0,0.25,0.5,0.75,1"
    repetitions: int = 3
    data: Path | None = None
    num_keys: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = "prompts of text: expected a MODEL, or --endpoint and --tokenizer"
        if self.data is not None and not self.has_text:
            raise ConfigError(f"--data is a text to hide needles in, for {wanted}")
        if self.prompts != PromptSettings() and not self.has_text:
            raise ConfigError(f"--add-bos is for {wanted}")
        check_least(self, num_keys=1, chunk=5, repetitions=1)
        super().__post_init__()

    @property
    def has_text(self) -> bool:
        """Whether prompts are texts; the retrieval model has words of its own."""
        from octavo.integrations.embedded_models import RETRIEVAL_MODEL as OWN

        return self.tokenizer is not None if self.endpoint else self.model not in (None, OWN.name)

    @property
    def row_names(self) -> tuple[str, ...]:
        """The rows of a local model."""
        from octavo.kernels.device import default_device

        own = CPU_ROWS if default_device().capability is None else RETRIEVAL_ROWS
        return self.recipe or (DEFAULT_ROWS if self.has_text else own)


@dataclass(frozen=True, kw_only=True)
class ChatRequest(ServedRequest):
    """Questions that a chat model answers, or a server."""

    data: str = GENERATED
    num_questions: int | None = None

    def __post_init__(self) -> None:
        if not self.endpoint and not self.model:
            raise ConfigError("expected a MODEL or --endpoint, one of them")
        super().__post_init__()

    @property
    def data_name(self) -> str:
        """What records call the data."""
        return self.data if self.data == GENERATED else Path(self.data).name


# How often the published evaluations ask each question, by a part of the data's name.
USUAL_REPETITIONS = {"aime": 10, "livecodebench": 10, "gpqa": 5, "math500": 5, "mrcr": 5}


@dataclass(frozen=True, kw_only=True)
class SampledRequest(ChatRequest):
    """Questions with answers that are drawn, and how.

    Attributes:
        repetitions: How often each question is asked; left out, 10 for AIME and LiveCodeBench, 5
            for GPQA, MATH-500 and MRCR by the name of --data, else 1.
        seed: Of the answers, and of the order of options.
        generation_config: Folder or name of a model whose sampling parameters are taken. Servers
            are told nothing without it and the sampling flags, and draw by their own defaults.
        max_tokens: Of an answer, thoughts included; left out, what the context has room for.
        temperature: In place of the model's own (generation_config.json); 0 is greedy. So with
            --top-p, --top-k and --min-p.
        max_concurrency: Questions that are answered at once.
        gpu_memory_utilization: Share of a GPU's memory for weights and cache.
        num_pages: Pages of the cache; left out, what the run can use and memory has room for.
    """

    unsaid = (*ServedRequest.unsaid, "gpu_memory_utilization", "num_pages")

    repetitions: int | None = None
    seed: int = 0
    generation_config: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    gpu_memory_utilization: float = 0.9
    num_pages: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, num_questions=1, repetitions=1, max_tokens=1, num_pages=1)
        check_least(self, temperature=0, top_k=0)
        if self.endpoint and self.prompts != PromptSettings():
            raise ConfigError("--add-bos and --chat-template are for a model; a server has its own")

    @property
    def usual_repetitions(self) -> int:
        """How often the published evaluations ask each question of such data."""
        name = re.sub(r"[^a-z0-9]", "", self.data.lower())
        found = (number for part, number in USUAL_REPETITIONS.items() if part in name)
        return next(found, 1)

    @property
    def sampling(self) -> dict[str, float]:
        """Sampling parameters that are set by hand, by the names of OpenAI's and vLLM's APIs."""
        names = ("temperature", "top_p", "top_k", "min_p")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class MrcrRequest(SampledRequest):
    """Long chats in which one of several equal requests is asked for again.

    Attributes:
        data: Questions: 'generated' small chats, a .parquet or .jsonl file or a folder of them
            (columns prompt, answer, random_string_to_prepend, n_needles), or a data set such as
            openai/mrcr.
        num_needles: Only questions with so many.
        max_length: Only questions that fit in so many tokens with their answers, such as 128k; left
            out, what the model was made for, or all questions of servers.
        num_questions: At most so many in a bucket of lengths.
        repetitions: How often each question is asked; left out, 5, or 1 if decoding is greedy.
        max_tokens: Of an answer; left out, 64 more than the true one has.
        max_concurrency: Requests open at once.
    """

    task = "mrcr"

    chunk: int | None = 2048
    num_needles: int | None = None
    max_length: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint and not self.tokenizer:
            raise ConfigError("--endpoint needs --tokenizer to count tokens; a model has its own")
        check_least(self, num_needles=1, chunk=5)

    @property
    def usual_repetitions(self) -> int:
        """As published, whatever the file is called."""
        return USUAL_REPETITIONS["mrcr"]


@dataclass(frozen=True, kw_only=True)
class ChoiceRequest(SampledRequest):
    """Questions with one right answer.

    Attributes:
        data: Questions: 'generated' small ones, a .csv, .jsonl or .parquet file or a folder of them
            (the columns of GPQA, or question, choices and answer), or a data set such as
            Idavidrein/gpqa with --subset gpqa_diamond.
        subset: Of a data set of the hub: gpqa_diamond.
        split: Of a data set of the hub; left out, its only one, or test.
        num_questions: The first so many of them.
        answers: Write every answer to this JSON Lines file as it comes: the text, what was read of
            it, and whether that is right.
        resume: Take the answers that --answers has already.
    """

    task = "choice"
    unsaid = (*SampledRequest.unsaid, "answers")

    subset: str | None = None
    split: str | None = None
    answers: Path | None = None

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of the questions."""
        parts = {"data": self.data_name, "subset": self.subset, "split": self.split}
        return {name: part for name, part in parts.items() if part}


@dataclass(frozen=True, kw_only=True)
class CodeRequest(ChoiceRequest):
    """Problems that a program solves.

    Attributes:
        data: Problems: 'generated' small ones, or LiveCodeBench's .jsonl or .parquet files, or a
            folder of them: test6.jsonl is what its version 6 adds, test.jsonl to test6.jsonl are
            all of it.
        repetitions: How often each problem is asked; left out, 10.
        allow_code: Run the programs that the model writes, in a sandbox without network.
        answers: Write every answer to this JSON Lines file as it comes: the text, its program, and
            whether that passed all tests.
    """

    task = "code"

    allow_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.allow_code:
            raise ConfigError(
                "octavo eval code runs programs that a model writes, in a sandbox: add --allow-code"
            )

    @property
    def usual_repetitions(self) -> int:
        """As published, whatever the file is called."""
        return USUAL_REPETITIONS["livecodebench"]


@dataclass(frozen=True, kw_only=True)
class MathRequest(ChoiceRequest):
    """Problems with one right answer.

    Attributes:
        data: Problems: 'generated' arithmetic, a .jsonl, .parquet or .csv file or a folder of them
            (columns problem or question, and answer), or a data set such as HuggingFaceH4/MATH-500
            or HuggingFaceH4/aime_2024.
    """

    task = "math"

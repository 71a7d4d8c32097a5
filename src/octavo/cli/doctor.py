"""octavo doctor: what this machine has, and what a model's KV cache takes and bears."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.cli.console import err, out, print_table
from octavo.cli.options import takes_settings
from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about a model's KV cache.

    Attributes:
        context: How much memory the KV cache of a sequence of so many tokens takes (128k).
        is_kv: Run the model over a text with an FP8 cache and scales of 1.0; the exit code is 1 if
            any key or value saturates.
        data: The text for --kv; left out, a page that octavo has.
        num_tokens: How much of the text --kv reads at most.
        kv_cache_dtype: fp8 is e4m3.
        skip_layers: For --context: layers left in BF16 (0-1, sliding_window, …); may be given more
            than once.
        granularity: For --context: which values share a scale.
        gpu_memory: For --context: of a GPU that is not here (141GiB, 80GB).
    """

    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or name, for --context (its config.json is enough) and --kv; "
            "left out, this machine is described.",
            show_default=False,
        ),
    ] = None
    context: str | None = None
    is_kv: Annotated[bool, typer.Option("--kv")] = False
    data: Path | None = None
    num_tokens: Annotated[int, typer.Option(min=1)] = 2048
    kv_cache_dtype: Literal["fp8", "fp8_e5m2"] = "fp8"
    skip_layers: Annotated[tuple[str, ...], typer.Option("--kv-cache-dtype-skip-layers")] = ()
    granularity: Literal["tensor", "head", "token"] = "tensor"
    gpu_memory: str | None = None

    def __post_init__(self) -> None:
        if (self.model is None) != (self.context is None and not self.is_kv):
            raise ConfigError(
                "expected a MODEL with --context or --kv, or none of them: octavo doctor MODEL "
                "--context 128k"
            )
        if not self.is_kv and self.data is not None:
            raise ConfigError("--data is for --kv, which is not asked for")
        if self.context is None and (self.skip_layers or self.gpu_memory):
            raise ConfigError(
                "skipped layers and GPU memory are for --context, which is not asked for"
            )

    @property
    def format(self) -> Literal["e4m3", "e5m2"]:
        """The format of the FP8 cache."""
        return "e5m2" if self.kv_cache_dtype == "fp8_e5m2" else "e4m3"


@takes_settings
def doctor(asked: Question) -> None:
    """Show what this machine has, or what a model's KV cache takes and bears.

    Alone: GPU, versions and environment, what octavo was run with on a GPU and what it was only
    compiled for, and which implementation each op would use and why. With a MODEL: --context counts
    the cache's bytes in BF16 and FP8 from config.json alone; --kv finds layers whose keys and
    values break at scales of 1.0, before traffic does.
    """
    if asked.model is None:
        return _describe_machine()
    if asked.context is not None:
        _count_memory(asked.model, asked.context, asked)
    if asked.is_kv and not _check_kv(asked.model, asked):
        raise typer.Exit(1)


def _count_memory(model: str, context: str, asked: Question) -> None:
    from octavo.amounts import parse_bytes, parse_tokens
    from octavo.integrations.transformers.cache_layers import read_cached_model
    from octavo.kernels.device import default_device
    from octavo.measure.advise import memory
    from octavo.recipe import KvCacheSettings

    num_tokens, given = parse_tokens(context), asked.gpu_memory
    gpu_bytes = (parse_bytes(given) if given else default_device().memory_bytes) or None
    # The scales' values do not matter here, only how many there are.
    scaling: Any = "dynamic" if asked.granularity == "token" else "unit"
    settings = KvCacheSettings(format=asked.format, granularity=asked.granularity, scaling=scaling)
    found = read_cached_model(model)
    print_table(memory.memory_table(found, num_tokens, settings, asked.skip_layers, gpu_bytes))
    for note in memory.memory_notes(found, num_tokens, gpu_bytes):
        out.print(note)


def _check_kv(model: str, asked: Question) -> bool:
    from octavo.demo.story import sample_text
    from octavo.integrations.transformers.text_model import load_text_model, read_text
    from octavo.measure.advise.memory import check_kv, check_table, kv_advice

    text = sample_text() if asked.data is None else read_text(asked.data)
    with err.status("loading the model"):
        text_model = load_text_model(model)
    length = min(asked.num_tokens, text_model.max_length or asked.num_tokens)
    window = text_model.first_window(text, length)
    with err.status(f"{len(window)} tokens, as they are and in FP8"):
        check = check_kv(text_model, [window], asked.format)
    print_table(check_table(check))
    for line in kv_advice(check, model):
        out.print(line)
    return check.is_good


def _describe_machine() -> None:
    from octavo.measure.advise.gpus import describe_machine

    for part in describe_machine():
        if isinstance(part, str):
            out.print(part, style="yellow", soft_wrap=True)
        else:
            print_table(part)

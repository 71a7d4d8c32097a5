"""octavo doctor: what this machine has, and what a model's KV cache takes and bears."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.cli.console import err, out, print_parts, print_table
from octavo.cli.options import takes_settings
from octavo.errors import ConfigError

Format = Literal["e4m3", "e5m2"]


@takes_settings
def doctor(
    model: Annotated[str | None, typer.Argument()] = None,
    context: str | None = None,
    is_kv: Annotated[bool, typer.Option("--kv")] = False,
    data: Path | None = None,
    num_tokens: Annotated[int, typer.Option(min=1)] = 2048,
    kv_cache_dtype: Literal["fp8", "fp8_e5m2"] = "fp8",
    skip_layers: Annotated[tuple[str, ...], typer.Option("--kv-cache-dtype-skip-layers")] = (),
    granularity: Literal["tensor", "head", "token"] = "tensor",
    gpu_memory: str | None = None,
) -> None:
    """Show what this machine has, or what a model's KV cache takes and bears.

    Alone: GPU, versions and environment, what octavo was run with on a GPU and what it was only
    compiled for, and which implementation each op would use and why. With a MODEL: --context counts
    the cache's bytes in BF16 and FP8 from config.json alone; --kv finds layers whose keys and
    values break at scales of 1.0, before traffic does.

    Attributes:
        model: A model's folder or name, for --context (its config.json is enough) and --kv; left
            out, this machine is described.
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
    if (model is None) != (context is None and not is_kv):
        asked = "octavo doctor MODEL --context 128k"
        raise ConfigError(f"expected a MODEL with --context or --kv, or none of them: {asked}")
    if not is_kv and data is not None:
        raise ConfigError("--data is for --kv, which is not asked for")
    if context is None and (skip_layers or gpu_memory):
        raise ConfigError("skipped layers and GPU memory are for --context: ask for it")
    if model is None:
        from octavo.measure.advise.gpus import describe_machine

        return print_parts(describe_machine(), style="yellow")
    format: Format = "e5m2" if kv_cache_dtype == "fp8_e5m2" else "e4m3"
    if context is not None:
        from octavo.amounts import parse_bytes, parse_tokens
        from octavo.integrations.transformers.cache_layers import read_cached_model
        from octavo.kernels.device import default_device
        from octavo.measure.advise import memory
        from octavo.recipe import KvCacheSettings

        # The scales' values do not matter here, only how many there are.
        scaling: Any = "dynamic" if granularity == "token" else "unit"
        settings = KvCacheSettings(format=format, granularity=granularity, scaling=scaling)
        length, found = parse_tokens(context), read_cached_model(model)
        gpu_bytes = parse_bytes(gpu_memory) if gpu_memory else default_device().memory_bytes
        print_table(memory.memory_table(found, length, settings, skip_layers, gpu_bytes or None))
        for note in memory.memory_notes(found, length, gpu_bytes or None):
            out.print(note)
    if is_kv and not _check_kv(model, data, num_tokens, format):
        raise typer.Exit(1)


def _check_kv(model: str, data: Path | None, num_tokens: int, format: Format) -> bool:
    from octavo.demo.story import sample_text
    from octavo.integrations.transformers.text_model import load_text_model, read_text
    from octavo.measure.advise.memory import check_kv, check_table, kv_advice

    text = sample_text() if data is None else read_text(data)
    with err.status("loading the model"):
        text_model = load_text_model(model)
    window = text_model.first_window(text, min(num_tokens, text_model.max_length or num_tokens))
    with err.status(f"{len(window)} tokens, as they are and in FP8"):
        check = check_kv(text_model, [window], format)
    print_table(check_table(check))
    for line in kv_advice(check, model):
        out.print(line)
    return check.is_good

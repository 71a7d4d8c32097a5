"""octavo doctor: what this machine has, and what a model's KV cache takes and bears."""

import platform
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err, out
from octavo.cli.tables import print_table

if TYPE_CHECKING:
    from octavo.kernels.device import Device


class KvCacheDtype(StrEnum):
    """The formats of an FP8 cache, as vLLM's command line knows them."""

    fp8 = "fp8"
    fp8_e5m2 = "fp8_e5m2"


class GranularityName(StrEnum):
    """Which values of a cache share a scale."""

    tensor = "tensor"
    head = "head"
    token = "token"


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or name, for --context (its config.json is enough) and --kv; "
            "left out, this machine is described.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            help="How much memory the KV cache of a sequence of so many tokens takes (128k).",
            show_default=False,
        ),
    ] = None,
    is_kv: Annotated[
        bool,
        typer.Option(
            "--kv",
            help="Run the model over a text with an FP8 cache and scales of 1.0; the exit code is "
            "1 if any key or value saturates.",
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="The text for --kv; left out, a page that octavo has.",
            show_default=False,
        ),
    ] = None,
    num_tokens: Annotated[
        int, typer.Option("--num-tokens", min=1, help="How much of the text --kv reads at most.")
    ] = 2048,
    kv_cache_dtype: Annotated[
        KvCacheDtype, typer.Option("--kv-cache-dtype", help="fp8 is e4m3.")
    ] = KvCacheDtype.fp8,
    skip_layers: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-cache-dtype-skip-layers",
            help="For --context: layers left in BF16 (0-1, sliding_window, …); may be given more "
            "than once.",
            show_default=False,
        ),
    ] = None,
    granularity: Annotated[
        GranularityName,
        typer.Option("--granularity", help="For --context: which values share a scale."),
    ] = GranularityName.tensor,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory",
            help="For --context: of a GPU that is not here (141GiB, 80GB).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what this machine has, or what a model's KV cache takes and bears.

    Alone: GPU, versions and environment, what octavo was run with on a GPU and what it was only
    compiled for, and which implementation each op would use and why. With a MODEL: --context counts
    the cache's bytes in BF16 and FP8 from config.json alone; --kv finds layers whose keys and
    values break at scales of 1.0, before traffic does.
    """
    from octavo.errors import ConfigError

    if (model is None) != (context is None and not is_kv):
        raise ConfigError(
            "expected a MODEL with --context or --kv, or none of them: octavo doctor MODEL "
            "--context 128k"
        )
    if not is_kv and data is not None:
        raise ConfigError("--data is for --kv, which is not asked for")
    if context is None and (skip_layers or gpu_memory):
        raise ConfigError("skipped layers and GPU memory are for --context, which is not asked for")
    if model is None:
        return _describe_machine()
    if context is not None:
        _count_memory(model, context, kv_cache_dtype, skip_layers or [], granularity, gpu_memory)
    if is_kv and not _check_kv(model, data, num_tokens, kv_cache_dtype):
        raise typer.Exit(1)


def _count_memory(
    model: str,
    context: str,
    kv_cache_dtype: KvCacheDtype,
    skip_layers: list[str],
    granularity: GranularityName,
    gpu_memory: str | None,
) -> None:
    from octavo.integrations.transformers.cache_layers import read_cached_model
    from octavo.kernels.device import default_device
    from octavo.measure.advise import memory
    from octavo.recipe import KvCacheSettings

    num_tokens = memory.parse_tokens(context)
    gpu_bytes = memory.parse_bytes(gpu_memory) if gpu_memory else default_device().memory_bytes
    # The scales' values do not matter here, only how many there are.
    scaling = "dynamic" if granularity is GranularityName.token else "unit"
    settings = KvCacheSettings.read(
        {
            "format": _format(kv_cache_dtype),
            "granularity": granularity.value,
            "scaling": scaling,
        }
    )
    assert settings is not None
    found = read_cached_model(model)
    print_table(memory.memory_table(found, num_tokens, settings, skip_layers, gpu_bytes or None))
    for note in memory.memory_notes(found, num_tokens, gpu_bytes or None):
        out.print(note)


def _check_kv(model: str, data: Path | None, num_tokens: int, kv_cache_dtype: KvCacheDtype) -> bool:
    from octavo.demo.story import sample_text
    from octavo.integrations.transformers.text_model import load_text_model, read_text
    from octavo.measure.advise import kv_check

    text = sample_text() if data is None else read_text(data)
    with err.status("loading the model"):
        text_model = load_text_model(model)
    length = min(num_tokens, text_model.max_length or num_tokens)
    window = text_model.first_window(text, length)
    with err.status(f"{len(window)} tokens, as they are and in FP8"):
        check = kv_check.check_kv(text_model, [window], _format(kv_cache_dtype))
    print_table(kv_check.check_table(check))
    for line in kv_check.advice(check, model):
        out.print(line)
    return check.is_good


def _format(kv_cache_dtype: KvCacheDtype) -> str:
    return "e5m2" if kv_cache_dtype is KvCacheDtype.fp8_e5m2 else "e4m3"


def _describe_machine() -> None:
    from octavo import env
    from octavo.internals import SUPPORTED, version_warning
    from octavo.kernels.device import default_device
    from octavo.measure.advise.tried import caution_of_gpu, cautions_of_versions, tried_table
    from octavo.measure.records import Machine
    from octavo.measure.report.tables import Table
    from octavo.ops.explain import explain

    device = default_device()
    machine = Machine.current(gpu=device.gpu, capability=device.capability)
    facts = {
        "GPU": _describe_gpu(device),
        "CPU": machine.cpu,
        "Python": f"{machine.python} on {platform.system()} {platform.machine()}",
        **machine.versions,
    }
    print_table(Table(caption="This machine", header=("what", "found"), rows=tuple(facts.items())))
    has_gpu = device.capability is not None
    print_table(tried_table({**machine.versions, "GPU": device.name if has_gpu else "none"}))
    if device.capability is not None and (text := caution_of_gpu(device.name, device.capability)):
        out.print(text, style="yellow", soft_wrap=True)
    for text in cautions_of_versions(machine.versions, has_gpu=has_gpu):
        out.print(text, style="yellow", soft_wrap=True)
    print_table(
        Table(
            caption="What each op runs here",
            header=("op", "operands", "impl", "why"),
            rows=tuple(
                (row.op, row.operands, row.selection.impl if row.selection else "none", row.reason)
                for row in explain(device)
            ),
        )
    )
    print_table(
        Table(
            caption="Environment variables",
            header=("variable", "value", "meaning"),
            rows=tuple((v.name, v.read(), v.meaning) for v in env.VARIABLES),
        )
    )
    for name in env.unknown_variables():
        out.print(f"warning: {name} is set, but octavo has no such variable", style="yellow")
    for library, version in machine.versions.items():
        if library in SUPPORTED and (warning := version_warning(library, version)):
            out.print(f"warning: {warning}", style="yellow", markup=False)


def _describe_gpu(device: "Device") -> str:
    if device.capability is None:
        return "none that torch can use"
    major, minor = device.capability
    memory = f"{device.memory_bytes / 2**30:.0f} GiB"
    return f"{device.name}, compute capability {major}.{minor}, {device.num_sms} SMs, {memory}"

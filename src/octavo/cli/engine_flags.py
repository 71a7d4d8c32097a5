"""Flags of commands that run an engine themselves; names are those of `octavo serve`."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from octavo.serving.engine.settings import EngineSettings

Model = Annotated[
    str | None,
    typer.Argument(
        help="A model's folder, GGUF file or hub name; or --config for random weights.",
        show_default=False,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="Sizes of a model with random weights, the same for all rows: llama-3.1-8b (the "
        "default on a GPU), gpt-oss-like (24 layers, 64 heads over 8, head_dim 64, sinks, a window "
        "of 128 in every other layer; one dense MLP as large as the experts that a token sees), "
        "tiny (the default on a CPU) or tiny-gpt-oss.",
        show_default=False,
    ),
]
Layers = Annotated[
    int | None,
    typer.Option("--layers", min=1, help="Only so many layers; with --config.", show_default=False),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Of the weights: auto (the checkpoint's; bfloat16 with --config), bfloat16, float16 "
        "or float32.",
    ),
]
IgnoredLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--ignored-layers",
        help="Linear layers that --quantization leaves as they are: a part of a name "
        "(down_proj), a glob, re:…, a layer's number or range; may be given more than once.",
        show_default=False,
    ),
]
WeightOnlyLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--weight-only-layers",
        help="Linear layers of which --quantization changes the weight alone; with --omni, "
        "modulation is all of that kind. May be given more than once.",
        show_default=False,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", help="cuda, cuda:1, cpu; left out, a GPU if there is one.", show_default=False
    ),
]
Rows = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache-dtype",
        help="A row: auto (as the model computes), fp8, fp8_e4m3, fp8_e5m2, or a recipe's .toml or "
        ".json file; may be given more than once, and is auto and fp8 if left out. The first is "
        "what the others are compared with. After an FP8 name: +head or +token (a scale for each "
        "head, or for each token and head), +unit (scales of 1.0) and +skip=PATTERN, such as "
        "fp8+skip=sliding_window. Scales are the checkpoint's, or, of random weights, calibrated "
        "first. After any: +linear, linear layers in FP8 as well; and last +prefill=IMPL, "
        "attention of prompts by that implementation, such as "
        "auto+prefill=vllm-fa3 with --peers.",
        show_default=False,
    ),
]
SkipLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache-dtype-skip-layers",
        help="Layers whose cache is left as it is in every FP8 row (0-1, sliding_window, …); may "
        "be given more than once.",
        show_default=False,
    ),
]
Peers = Annotated[
    Path | None,
    typer.Option(
        "--peers",
        help="Folder with vLLM's FlashAttention-3 (*.abi3.so), which rows may then ask for: "
        "auto+prefill=vllm-fa3.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs",
        min=1,
        help="Requests that run at once; left out, 256, or --max-num-batched-tokens if that is "
        "less.",
        show_default=False,
    ),
]
BatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        min=1,
        help="Tokens of one forward pass; left out, 2048, or one for each request if more run at "
        "once.",
        show_default=False,
    ),
]
MemoryFraction = Annotated[
    float,
    typer.Option("--gpu-memory-utilization", help="Share of a GPU's memory for weights and cache."),
]
NumPages = Annotated[
    int | None,
    typer.Option(
        "--num-pages",
        min=1,
        help="Of the cache; left out, what the run can use and memory has room for.",
        show_default=False,
    ),
]
PageSize = Annotated[int, typer.Option("--page-size", help="Tokens of a page.")]
EnforceEager = Annotated[
    bool,
    typer.Option("--enforce-eager", help="No CUDA graphs: every kernel is launched by itself."),
]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile the model's dense parts.")]
Seed = Annotated[int, typer.Option("--seed", help="Of random prompts.")]

DEFAULT_ROWS = ("auto", "fp8")


def batch_limits(num_seqs: int | None, num_tokens: int | None) -> dict[str, int]:
    """max_num_seqs and max_num_batched_tokens; the one that is left out fits the other."""
    from octavo.serving.engine.scheduler import SchedulerSettings as Default

    return {
        "max_num_seqs": num_seqs or min(Default.max_num_seqs, num_tokens or Default.max_num_seqs),
        "max_num_batched_tokens": num_tokens or max(Default.max_num_batched_tokens, num_seqs or 0),
    }


def make_settings(*, enforce_eager: bool, compile: bool, **settings: Any) -> "EngineSettings":
    """EngineSettings of the flags."""
    from octavo.serving.engine.settings import EngineSettings

    cuda_graphs = False if enforce_eager else None
    return EngineSettings(cuda_graphs=cuda_graphs, compile=compile, **settings)


def choose_subject(
    model: str | None, config: str | None, device: str | None
) -> tuple[str | None, str]:
    """The config to take, and the device."""
    from octavo.integrations.transformers.load import choose_device

    device = choose_device(device)
    if model is None and config is None:
        config = "llama-3.1-8b" if device.startswith("cuda") else "tiny"
    return config, device


def command_line(name: str, words: list[str], flags: Mapping[str, Any]) -> str:
    """The command that repeats a measurement; flags of None, False or [] are left out."""
    parts = ["octavo", "bench", name, *words]
    for flag, value in flags.items():
        match value:
            case None | False:
                continue
            case True:
                parts.append(flag)
            case list() | tuple():
                for one in value:
                    parts += [flag, str(one)]
            case _:
                parts += [flag, str(value)]
    return shlex.join(parts)

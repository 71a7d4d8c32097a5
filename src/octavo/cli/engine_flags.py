"""Flags of an engine one by one, for commands that do not take `engine_options` yet."""

from typing import Annotated

import typer

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
EnforceEager = Annotated[
    bool,
    typer.Option("--enforce-eager", help="No CUDA graphs: every kernel is launched by itself."),
]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile the model's dense parts.")]


def batch_limits(num_seqs: int | None, num_tokens: int | None) -> dict[str, int]:
    """max_num_seqs and max_num_batched_tokens; the one that is left out fits the other."""
    from octavo.serving.engine.scheduler import SchedulerSettings as Default

    return {
        "max_num_seqs": num_seqs or min(Default.max_num_seqs, num_tokens or Default.max_num_seqs),
        "max_num_batched_tokens": num_tokens or max(Default.max_num_batched_tokens, num_seqs or 0),
    }

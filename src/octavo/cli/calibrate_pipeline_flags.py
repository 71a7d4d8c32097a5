"""Flags of octavo calibrate that are for --pipeline alone."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

PANEL = "With --pipeline"


class By(StrEnum):
    """What is quantized at a time, as the command line knows it."""

    layer = "layer"
    group = "group"
    block = "block"


IsPipeline = Annotated[
    bool,
    typer.Option(
        "--pipeline",
        help="Calibrate a diffusion pipeline, over prompts and timesteps: MODEL is its folder or "
        "its name on the hub; left out, the small image model.",
        rich_help_panel=PANEL,
    ),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="A file with a prompt in each line, or a .jsonl file with a field prompt.",
        rich_help_panel=PANEL,
    ),
]
PromptTexts = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="A prompt; may be given often.", rich_help_panel=PANEL),
]
NumSteps = Annotated[
    int | None,
    typer.Option(
        "--num-inference-steps",
        min=1,
        help="Denoising steps of each prompt; left out, the pipeline's own number.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
Height = Annotated[
    int | None, typer.Option("--height", min=1, help="In pixels.", rich_help_panel=PANEL)
]
Width = Annotated[
    int | None, typer.Option("--width", min=1, help="In pixels.", rich_help_panel=PANEL)
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", help="Of the first prompt's noise; the next has the next.", rich_help_panel=PANEL
    ),
]
CallOptions = Annotated[
    str | None,
    typer.Option(
        "--call-options",
        help='Other arguments of the pipeline\'s call, as JSON: {"guidance_scale": 4}.',
        rich_help_panel=PANEL,
    ),
]
IsAttention = Annotated[
    bool,
    typer.Option(
        "--attention", help="Scales of attention as well, in the same file.", rich_help_panel=PANEL
    ),
]
IsTextEncoder = Annotated[
    bool,
    typer.Option(
        "--text-encoder",
        help="Scales of the linear layers of text encoders as well.",
        rich_help_panel=PANEL,
    ),
]
IgnoredLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--ignored-layers",
        help="A pattern of linear layers to leave; may be given often.",
        rich_help_panel=PANEL,
    ),
]
WeightOnlyLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--weight-only-layers",
        help="A pattern of linear layers whose weight alone will be quantized, which need no "
        "scale; modulation is all of that kind. May be given often.",
        rich_help_panel=PANEL,
    ),
]
IsSensitivity = Annotated[
    bool,
    typer.Option(
        "--sensitivity",
        help="Not scales: the error of the transformer's result when one layer alone is FP8, and "
        "from that which layers to ignore.",
        rich_help_panel=PANEL,
    ),
]
SensitivityBy = Annotated[
    By,
    typer.Option(
        "--sensitivity-by",
        help="What is quantized at a time: a layer, the layers of one kind in all blocks, or those "
        "of one block.",
        rich_help_panel=PANEL,
    ),
]
IsAll = Annotated[
    bool,
    typer.Option(
        "--all",
        help="With --sensitivity: also the layers that the model's defaults leave in BF16.",
        rich_help_panel=PANEL,
    ),
]
NumTimesteps = Annotated[
    int,
    typer.Option(
        "--num-timesteps",
        min=1,
        help="With --sensitivity: at how many of the steps, spread evenly.",
        rich_help_panel=PANEL,
    ),
]
Records = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Append the records to this JSON Lines file.",
        rich_help_panel=PANEL,
    ),
]

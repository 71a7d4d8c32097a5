"""The --mm-encoder flags, which several commands share; names are vLLM's."""

from pathlib import Path
from typing import Annotated

import typer

AttnDtype = Annotated[
    str | None,
    typer.Option("--mm-encoder-attn-dtype", help="fp8; left out, as the model is."),
]
AttnBackend = Annotated[
    str | None,
    typer.Option(
        "--mm-encoder-attn-backend",
        help="Implementation of FP8 attention, one of octavo's: gluon, triton, reference or "
        "a registered one; left out, the fastest that can run (octavo doctor says which).",
    ),
]
ScalePath = Annotated[
    Path | None,
    typer.Option("--mm-encoder-fp8-scale-path", help="Static scales from this file."),
]
ScaleSavePath = Annotated[
    Path | None,
    typer.Option(
        "--mm-encoder-fp8-scale-save-path",
        help="Save the dynamic scales here, once every layer has seen 16 passes.",
    ),
]
ScaleSaveMargin = Annotated[
    float | None,
    typer.Option(
        "--mm-encoder-fp8-scale-save-margin",
        help="Times the scales that are saved; 1.5 if left out.",
        show_default=False,
    ),
]

"""The --mm-encoder flags, which several commands share; names are vLLM's."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import err

if TYPE_CHECKING:
    from octavo.integrations.transformers.encoder_options import EncoderOptions

VLLM_BACKEND = "FLASHINFER"  # the one that vLLM's guide to FP8 attention of encoders asks for

AttnDtype = Annotated[
    str | None,
    typer.Option("--mm-encoder-attn-dtype", help="fp8; left out, as the model is."),
]
AttnBackend = Annotated[
    str | None,
    typer.Option(
        "--mm-encoder-attn-backend",
        help="Implementation of FP8 attention, one of octavo's: gluon, triton, reference or "
        "a registered one; left out, the fastest that can run (octavo doctor says which). "
        "vLLM's FLASHINFER is accepted, and octavo's own runs.",
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


def encoder_options(
    *, attn_dtype: str | None, attn_backend: str | None, **others: Any
) -> "EncoderOptions":
    """The options that the flags mean; a note says what runs in place of vLLM's backend."""
    from octavo.integrations.transformers.encoder_options import EncoderOptions

    if attn_backend == VLLM_BACKEND and attn_dtype == "fp8":
        err.print(
            f"note: octavo has no {VLLM_BACKEND} backend and runs its own FP8 attention instead, "
            "the fastest implementation that can run here",
            soft_wrap=True,
        )
        attn_backend = None
    return EncoderOptions(attn_dtype=attn_dtype, attn_backend=attn_backend, **others)

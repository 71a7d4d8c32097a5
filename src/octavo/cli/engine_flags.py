"""Flags of an engine one by one, for commands that do not take `engine_options` yet."""

from typing import Annotated

import typer

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

"""Flags of commands that turn texts or chats into a model's tokens."""

from typing import Annotated

import typer

AddBos = Annotated[
    bool | None,
    typer.Option(
        "--add-bos/--no-add-bos",
        help="Whether prompts start with the BOS token; left out, as the tokenizer does it, with a "
        "warning where that looks wrong. Chats follow their template, but --add-bos puts BOS in "
        "front if the template does not.",
        show_default=False,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        help="Jinja template for chats in place of the model's own: a file, or the template.",
        show_default=False,
    ),
]

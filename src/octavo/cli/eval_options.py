"""Options of prompts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octavo.integrations.transformers.tokenizer import PromptSettings


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How texts or chats become a model's tokens.

    Attributes:
        chat_template: Jinja template for chats in place of the model's own: a file, or the
            template.
        add_bos: Whether prompts start with the BOS token; left out, as the tokenizer does it, with
            a warning where that looks wrong. Chats follow their template, but --add-bos puts BOS in
            front if the template does not.
    """

    chat_template: str | None = None
    add_bos: Annotated[bool | None, typer.Option("--add-bos/--no-add-bos")] = None

    def settings(self) -> "PromptSettings":
        """The same for a tokenizer."""
        from octavo.integrations.transformers.tokenizer import PromptSettings

        return PromptSettings(add_bos=self.add_bos, chat_template=self.chat_template)

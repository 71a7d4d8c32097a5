"""A model's tokenizer: whether prompts start with BOS, which chat template they go through."""

import copy
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.errors import ConfigError, UnsupportedError
from octavo.internals import internals

# Families whose models were trained with BOS in front of every text, if their config names one.
BOS_FAMILIES = ("llama", "mistral", "ministral", "mixtral", "gemma", "cohere", "deepseek")
NO_TEMPLATE = (
    "the model has no chat template: give it one with --chat-template FILE (octavo.LLM: "
    "chat_template=…), or send plain text (/v1/completions)"
)
_PROBE = "octavo"
# What a template may expect of a message's content: a text, parts, or parts with an image.
_PROBES: tuple[Any, ...] = (
    _PROBE,
    [{"type": "text", "text": _PROBE}],
    [{"type": "image"}, {"type": "text", "text": _PROBE}],
)


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """How texts or chats become a model's tokens.

    Attributes:
        add_bos: Whether prompts start with the BOS token; left out, as the tokenizer does it, with
            a warning where that looks wrong. Chats follow their template, but --add-bos puts BOS in
            front if the template does not.
        chat_template: Jinja template for chats in place of the model's own: a file, or the
            template.
    """

    add_bos: bool | None = None
    chat_template: str | Path | None = None

    @property
    def command(self) -> list[str]:
        """The flags that say the same."""
        words = [] if self.add_bos is None else ["--add-bos" if self.add_bos else "--no-add-bos"]
        if self.chat_template is not None:
            words += ["--chat-template", str(self.chat_template)]
        return words

    @property
    def about(self) -> dict[str, str | bool]:
        """What records say of them: nothing if the model's own are used."""
        found: dict[str, str | bool] = {} if self.add_bos is None else {"add_bos": self.add_bos}
        if (template := self.read_template()) is not None:
            found["chat_template"] = hashlib.sha256(template.encode()).hexdigest()[:12]
        return found

    def read_template(self) -> str | None:
        """The text of the chat template, None if none is given."""
        given = self.chat_template
        if given is None or (isinstance(given, str) and ("{{" in given or "{%" in given)):
            return given
        try:
            return Path(given).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                "expected a chat template: a file, or the template itself with {{ … }} or {% … %} "
                f"in it; got {brief(str(given))}: {error}"
            ) from None


def prepare_tokenizer(tokenizer: Any, settings: PromptSettings, config: Any = None) -> Any:
    """The tokenizer whose prompts follow the settings; a copy if that changes it.

    Every prompt of octavo is encoded by such a one: this alone decides on BOS.
    """
    if settings.add_bos is None and settings.chat_template is None:
        _warn_without_bos(tokenizer, config)
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    if (template := settings.read_template()) is not None:
        tokenizer.chat_template = template
        check_template(tokenizer)
    if settings.add_bos is None:
        _warn_without_bos(tokenizer, config)
    else:
        _set_bos(tokenizer, settings.add_bos)
    return tokenizer


def text_tokens(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """The tokens of a prompt; one BOS at most, even if the text begins with it already."""
    # verbose: whether a prompt is too long for the model is not for the tokenizer to say.
    ids = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    bos = getattr(tokenizer, "bos_token_id", None)
    has_two = add_special_tokens and list(ids[:2]) == [bos, bos]
    return tuple(ids[1:] if has_two else ids)


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """A conversation as the chat template writes it; ConfigError if it cannot."""
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    # A template raises what its author thought of, and what its code runs into.
    except Exception as error:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(NO_TEMPLATE) from None
        reason = f"{type(error).__name__}: {brief(str(error))}"
        raise ConfigError(f"the chat template does not take these messages: {reason}") from None
    return text


def chat_tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> tuple[int, ...]:
    """The tokens of a conversation: special tokens are those that the chat template writes."""
    text = chat_text(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    return text_tokens(tokenizer, text, add_special_tokens=False)


def check_template(tokenizer: Any) -> None:
    """ConfigError unless a tokenizer or processor has a chat template that writes messages."""
    if not tokenizer.chat_template:
        raise ConfigError(NO_TEMPLATE)
    problem = "it leaves the messages out"
    for content in _PROBES:
        try:
            if _PROBE in chat_text(tokenizer, [{"role": "user", "content": content}]):
                return
        except ConfigError as error:
            problem = str(error)
    raise ConfigError(f"expected a chat template that writes a user's message: {problem}")


def _set_bos(tokenizer: Any, add_bos: bool) -> None:
    """Have texts start with BOS, or not; and chats, if they are to."""
    token, bos = tokenizer.bos_token, tokenizer.bos_token_id
    if bos is None:
        if add_bos:
            raise ConfigError("add_bos needs a BOS token, got a tokenizer that names none")
        return
    before = text_tokens(tokenizer, "a")
    if (before[:1] == (bos,)) != add_bos:
        with suppress(AttributeError):
            tokenizer.add_bos_token = add_bos
        if text_tokens(tokenizer, "a") != ((bos, *before) if add_bos else before[1:]):
            raise UnsupportedError(
                f"{type(tokenizer).__name__} cannot be told whether to add {token}: leave add_bos "
                "out, or give prompts as tokens"
            )
    if add_bos and (template := tokenizer.chat_template):
        is_one = isinstance(template, str)
        written = {
            name: text if "bos_token" in text or token in text else "{{ bos_token }}" + text
            for name, text in ({"": template} if is_one else template).items()
        }
        tokenizer.chat_template = written[""] if is_one else written


def _warn_without_bos(tokenizer: Any, config: Any) -> None:
    """Warn of texts that start without the BOS token that the model was likely trained with."""
    token, bos = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    if token is None or bos is None or text_tokens(tokenizer, "a")[:1] == (bos,):
        return
    if reason := _bos_reason(tokenizer, config):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        warnings.warn(
            f"{name}: text prompts start without the BOS token {token!r}, although {reason}; a "
            "model trained with BOS answers much worse without it. --add-bos (octavo.LLM: "
            "add_bos=True) adds it, --no-add-bos says that this is right",
            stacklevel=2,
        )


def _bos_reason(tokenizer: Any, config: Any) -> str | None:
    """Why texts should start with BOS; None if nothing says so."""
    # transformers drops it from what it loads where there is a tokenizer.json.
    with internals("transformers"):
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

    declared = tokenizer.init_kwargs.get("add_bos_token")
    if declared is None and tokenizer.name_or_path:
        with suppress(OSError, ValueError):
            declared = get_tokenizer_config(tokenizer.name_or_path).get("add_bos_token")
    if declared is not None:
        return "its tokenizer_config.json has add_bos_token: true" if declared else None
    template = tokenizer.chat_template or ""
    written = template if isinstance(template, str) else "".join(template.values())
    if "bos_token" in written:
        return "its chat template writes it"
    if config is None or tokenizer.bos_token in written:  # a mark between messages, as in ChatML
        return None
    text = config.get_text_config()
    is_named = text.bos_token_id == tokenizer.bos_token_id != tokenizer.eos_token_id
    if is_named and str(text.model_type).startswith(BOS_FAMILIES):
        return f"the model's config names it (bos_token_id {text.bos_token_id})"
    return None

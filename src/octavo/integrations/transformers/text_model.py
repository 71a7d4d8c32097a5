"""Text models: a decoder with its tokenizer, and a text as windows of its tokens."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.calibration.data import PromptData, TextData
from octavo.calibration.run import Subject
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.transformers.gguf_file import (
    find_gguf,
    model_name,
    pretrained_source,
    read_once,
    tokenizer_source,
)
from octavo.integrations.transformers.load import (
    check_dtype,
    choose_device,
    default_dtype,
    dtype_name,
    load_weights,
    loading,
)
from octavo.integrations.transformers.observe_text import observe_text
from octavo.integrations.transformers.small_model import NAME, load_small_model
from octavo.integrations.transformers.text import find_layers, find_uncentered
from octavo.integrations.transformers.tokenizer import PromptSettings, prepare_tokenizer
from octavo.integrations.transformers.windows import Window, cut_windows, run_windows

# A tokenizer needs much time and memory for a long text; a piece of it is mostly enough.
CHARACTERS_PER_TOKEN = 8
CALIBRATION_LENGTH = 2048
MAX_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass(frozen=True)
class TextModel:
    """A decoder and its tokenizer, which follows `prompts`."""

    name: str
    model: Any
    tokenizer: Any
    prompts: PromptSettings = PromptSettings()

    @property
    def dtype(self) -> str:
        """The model's own dtype, as tables call it."""
        name = dtype_name(self.model)
        return {"bfloat16": "bf16", "float16": "fp16"}.get(name, name)

    @property
    def max_length(self) -> int | None:
        """How many tokens the model was made for; None if its config does not say."""
        config = self.model.config.get_text_config()
        found = [getattr(config, name, None) for name in MAX_LENGTHS]
        return next((int(length) for length in found if length), None)

    def subject(self) -> Subject[Window]:
        """The attention layers as calibration takes them."""
        return Subject(
            name=self.name,
            dtype=dtype_name(self.model),
            kind="kv_cache",
            layers=list(find_layers(self.model)),
            observe=partial(observe_text, self.model),
            forward=partial(run_windows, self.model),
            is_nonfinite_refused=True,
            uncentered=find_uncentered(self.model),
        )

    def cut_windows(self, texts: TextData, max_length: int | None = None) -> PromptData[Window]:
        """Windows of at most `max_length` tokens; None: 2048, or the model's context if shorter."""
        context = self.max_length
        if max_length is None:
            max_length = min(CALIBRATION_LENGTH, context or CALIBRATION_LENGTH)
        if context is not None and max_length > context:
            raise ConfigError(
                f"expected max_length up to {context}, the context of {self.name}, got {max_length}"
            )
        return cut_windows(texts, self.tokenizer, max_length, self.prompts.about)

    def windows(self, text: str, length: int, num_windows: int, start: int = 0) -> list[Tensor]:
        """Windows start, start + 1, … of a text, [length] int64 each, which do not overlap.

        Where the tokenizer starts texts with a token of its own, every window starts with it, and
        has one token less of the text.
        """
        if length < 2 or num_windows < 1 or start < 0:
            raise ConfigError(
                f"expected windows of 2 tokens or more, got {num_windows} of {length} from {start}"
            )
        prefix = self._prefix()
        own = length - len(prefix)
        needed = own * (start + num_windows)
        ids = self.tokenizer(
            text[: CHARACTERS_PER_TOKEN * needed], add_special_tokens=False, verbose=False
        )["input_ids"]
        if len(ids) < needed and len(text) > CHARACTERS_PER_TOKEN * needed:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < needed:
            raise ConfigError(
                f"expected a text of {needed} tokens or more for {start + num_windows} windows of "
                f"{length}, got {len(ids)}: use a longer text, fewer windows or a shorter context"
            )
        starts = range(own * start, needed, own)
        return [torch.tensor(prefix + ids[first : first + own]) for first in starts]

    def first_window(self, text: str, max_length: int) -> Tensor:
        """The first tokens of a text, max_length or as many as it has."""
        prefix = self._prefix()
        piece = text[: CHARACTERS_PER_TOKEN * max_length]
        ids = self.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise ConfigError("expected a text with words in it, got an empty one")
        return torch.tensor((prefix + ids)[:max_length])

    def _prefix(self) -> list[int]:
        first = self.tokenizer("")["input_ids"][:1]
        return first if first and first[0] == self.tokenizer.bos_token_id else []


def read_text(path: str | Path) -> str:
    """A text file in UTF-8; CheckpointError if it is none."""
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected a text in UTF-8, got {error.reason}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: expected a text file: {error.strerror}") from None


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, from a folder or the hub."""
    from transformers import AutoTokenizer

    tokenizers: Any = AutoTokenizer
    source, options = tokenizer_source(name)
    with loading(name, "a tokenizer beside the model"):
        return tokenizers.from_pretrained(source, **options, trust_remote_code=False)


def load_text_model(
    name: str | None = None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    prompts: PromptSettings | None = PromptSettings(),
) -> TextModel:
    """A language model and its tokenizer; None is SmolLM2-135M-Instruct.

    name: a folder, a hub name, or a GGUF file. dtype: the checkpoint's own, or such as "bfloat16".
    device: the GPU if there is one. prompts: how texts and chats become tokens; None if nobody asks
    the tokenizer.
    """
    dtype, device = check_dtype(dtype), choose_device(device)
    if name is None:
        return _load_small(dtype, device, prompts)
    with read_once(name) if find_gguf(name) is not None else nullcontext():
        return _load_named(name, dtype, device, prompts)


def _load_named(name: str, dtype: str, device: str, prompts: PromptSettings | None) -> TextModel:
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    source, options = pretrained_source(name)
    with loading(name, "a model with a config.json"):
        config = AutoConfig.from_pretrained(source, **options, trust_remote_code=False)
    tokenizer = _prepared(load_tokenizer(name), prompts, config)  # before minutes of loading
    # The class that models are served with: its layer names are those of scale files.
    has_vision = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind: Any = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    model = load_weights(name, kind, dtype=dtype, device=device)
    find_layers(model)
    return TextModel(model_name(name), model, tokenizer, prompts or PromptSettings())


def _prepared(tokenizer: Any, prompts: PromptSettings | None, config: Any) -> Any:
    return tokenizer if prompts is None else prepare_tokenizer(tokenizer, prompts, config)


def _load_small(dtype: str, device: str, prompts: PromptSettings | None) -> TextModel:
    small, tokenizer = load_small_model(default_dtype(dtype, device))
    tokenizer = _prepared(tokenizer, prompts, small.config)
    return TextModel(NAME, small.to(device), tokenizer, prompts or PromptSettings())

"""Text models: a decoder with its tokenizer, and a text as windows of its tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, UnsupportedError

DTYPES = ("auto", "bfloat16", "float16", "float32")
# A tokenizer needs much time and memory for a long text; a piece of it is mostly enough.
CHARACTERS_PER_TOKEN = 8
MAX_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass(frozen=True)
class TextModel:
    """A decoder and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def dtype(self) -> str:
        """The model's own dtype, as tables call it."""
        name = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return {"bfloat16": "bf16", "float16": "fp16"}.get(name, name)

    @property
    def max_length(self) -> int | None:
        """How many tokens the model was made for; None if its config does not say."""
        config = self.model.config.get_text_config()
        found = [getattr(config, name, None) for name in MAX_LENGTHS]
        return next((int(length) for length in found if length), None)

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


def load_text_model(
    name: str | None = None, *, dtype: str = "auto", device: str | torch.device = "cpu"
) -> TextModel:
    """A decoder and its tokenizer from a folder or the hub; left out, SmolLM2-135M-Instruct.

    dtype: the checkpoint's own, or such as "bfloat16".
    """
    if dtype not in DTYPES:
        raise ConfigError(f"expected a dtype, one of {', '.join(DTYPES)}, got {dtype!r}")
    if name is None:
        return _small(dtype, device)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _loading(name, "a decoder with its weights"):
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    with _loading(name, "a tokenizer beside the model"):
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    return TextModel(name, model.eval().to(device), tokenizer)


def _small(dtype: str, device: str | torch.device) -> TextModel:
    from octavo.integrations.transformers.small_model import NAME, load_small_model

    # On a CPU float32 is both exact and the faster one.
    is_cpu = torch.device(device).type == "cpu"
    chosen = {"auto": "float32" if is_cpu else "bfloat16"}.get(dtype, dtype)
    model, tokenizer = load_small_model(getattr(torch, chosen))
    return TextModel(NAME, model.to(device), tokenizer)


@contextmanager
def _loading(name: str, expected: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(f"{name}: {brief(str(error))}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}: expected {expected}, got {type(error).__name__}: {brief(str(error))}"
        ) from error

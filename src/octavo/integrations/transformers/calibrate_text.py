"""Static scales for the keys, values and queries of a language model, from texts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.data import PromptData
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration, Subject
from octavo.calibration.run import calibrate as run_calibration
from octavo.calibration.scale_file import ScaleHeader, ScaleSet
from octavo.calibration.text_data import TextData
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.transformers.load import (
    check_dtype,
    choose_device,
    load_weights,
    loading,
)
from octavo.integrations.transformers.observe_text import observe_text
from octavo.integrations.transformers.small_model import NAME, load_small_model
from octavo.integrations.transformers.text import find_decoder, find_layers
from octavo.integrations.transformers.windows import Window, cut_windows

MAX_LENGTH = 2048


@dataclass(frozen=True)
class TextModel:
    """A language model and its tokenizer."""

    name: str
    model: nn.Module
    tokenizer: Any

    def subject(self) -> Subject[Window]:
        """The attention layers as calibration takes them."""
        return Subject(
            name=self.name,
            kind="kv_cache",
            layers=list(find_layers(self.model)),
            observe=partial(observe_text, self.model),
            forward=partial(run_windows, self.model),
            is_nonfinite_refused=True,
        )

    def cut_windows(self, texts: TextData, max_length: int | None = None) -> PromptData[Window]:
        """Windows of at most `max_length` tokens; None: 2048, or the model's context if shorter."""
        config: Any = self.model.config
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        if max_length is None:
            max_length = min(MAX_LENGTH, context or MAX_LENGTH)
        if context is not None and max_length > context:
            raise ConfigError(
                f"expected max_length up to {context}, the context of {self.name}, got {max_length}"
            )
        return cut_windows(texts, self.tokenizer, max_length)


def calibrate_kv(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    settings: CalibrationSettings | None = None,
) -> ScaleSet:
    """Static scales for a language model's KV cache, from batches of its inputs (input_ids, …).

    The model runs in its own dtype, without a cache, and is left as it was. Positions that an
    attention_mask leaves out do not count. `octavo calibrate --kv` does the same with texts and
    chats, prints what was seen and can be resumed.
    """
    calibration = run_calibration(
        Calibration(
            list(find_layers(model)), settings or CalibrationSettings(), is_nonfinite_refused=True
        ),
        ([inputs] for inputs in batches),
        observe=partial(observe_text, model),
        forward=lambda batch: run_inputs(model, batch[0]),
    )
    return calibration.result(ScaleHeader(kind="kv_cache")).scales


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


def run_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Run a model on a batch of its inputs, without a cache; padding is cut off."""
    input_ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        raise ConfigError(
            "expected batches with input_ids, a tensor [batch, length], got "
            f"{sorted(inputs) if input_ids is None else type(input_ids).__name__}"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        raise ConfigError(f"expected an attention_mask {list(input_ids.shape)} like the input_ids")
    others = inputs.keys() - {"input_ids", "attention_mask"}
    if not others:
        is_real = torch.ones_like(input_ids) if mask is None else mask
        rows = zip(input_ids, is_real.bool(), strict=True)
        windows = [ids[is_kept].tolist() for ids, is_kept in rows]
        run_windows(model, [window for window in windows if window])
        return
    if mask is not None and not bool(mask.all()):
        raise UnsupportedError(
            f"expected a batch without padding beside {', '.join(sorted(others))}, got padding: "
            "give one prompt at a time"
        )
    device = next(model.parameters()).device
    moved = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in inputs.items()}
    model(**{**moved, "use_cache": False})


def load_text_model(
    name: str | None, *, dtype: str = "auto", device: str | None = None
) -> TextModel:
    """A language model and its tokenizer, from a folder or the hub; None is SmolLM2-135M-Instruct.

    dtype: the checkpoint's own, or such as "bfloat16". device: the GPU if there is one.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    dtype, device = check_dtype(dtype), choose_device(device)
    if name is None:
        small, tokenizer = load_small_model(getattr(torch, "float32" if dtype == "auto" else dtype))
        return TextModel(NAME, small.to(device), tokenizer)
    tokenizers: Any = AutoTokenizer
    with loading(name, "a model with a config.json"):
        config = AutoConfig.from_pretrained(name)
    with loading(name, "a tokenizer beside the model"):
        tokenizer = tokenizers.from_pretrained(name)
    # The class that models are served with: its layer names are those of scale files.
    has_vision = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind: Any = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    model = load_weights(name, kind, dtype=dtype, device=device, unused=("lm_head",))
    find_layers(model)
    return TextModel(name, model, tokenizer)

"""Models by name as the engine serves them: weights, tokenizer, and an image processor if any."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from octavo.integrations.transformers.chart_reader import (
    END,
    FOLDER,
    SPECIAL,
    is_chart_reader,
    load_chart_reader,
)
from octavo.integrations.transformers.engine_images import has_vision
from octavo.integrations.transformers.load import check_dtype, choose_device, loading
from octavo.integrations.transformers.text_model import load_text_model

CHART_READER = "chart-reader"
IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ServedModel:
    """A model with what makes its inputs; image_processor: None if it takes text alone."""

    name: str
    model: Any
    tokenizer: Any
    image_processor: Any


def load_served_model(
    name: str | None = None, *, dtype: str = "auto", device: str | None = None
) -> ServedModel:
    """A model from a folder or the hub; None is SmolLM2, "chart-reader" the one of octavo.

    dtype: the checkpoint's own, or such as "bfloat16". device: the GPU if there is one.
    """
    if name is not None and (name == CHART_READER or is_chart_reader(Path(name))):
        return _load_reader(name, check_dtype(dtype), choose_device(device))
    loaded = load_text_model(name, dtype=dtype, device=device)
    processor = None
    if name is not None and has_vision(loaded.model):
        processor = _load_image_processor(name)
    return ServedModel(loaded.name, loaded.model, loaded.tokenizer, processor)


def _load_reader(name: str, dtype: str, device: str) -> ServedModel:
    folder = FOLDER if name == CHART_READER else Path(name)
    # On a CPU float32 is both exact and the faster one.
    own = "float32" if device == "cpu" else "bfloat16"
    reader = load_chart_reader(folder, getattr(torch, own if dtype == "auto" else dtype)).to(device)
    reader.model.generation_config.eos_token_id = SPECIAL.index(END)
    return ServedModel(name, reader.model, reader.chat_tokenizer(), reader.process_images)


def _load_image_processor(name: str) -> Any:
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in IMAGE_PROCESSOR_FILES):
        return None  # a folder of the language model alone: images are refused, by name
    automatic: Any = AutoImageProcessor
    # All of the families have this one; older versions do not find it without torchvision.
    of_pillow: Any = Qwen2VLImageProcessorPil
    has_torchvision = find_spec("torchvision") is not None
    with loading(name, "an image processor (preprocessor_config.json) beside the model"):
        kind = automatic if has_torchvision else of_pillow
        return kind.from_pretrained(name, trust_remote_code=False)

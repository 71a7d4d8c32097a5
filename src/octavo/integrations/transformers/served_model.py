"""Models by name as the engine serves them: weights, tokenizer, and an image processor if any."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.extras import need
from octavo.integrations.embedded_models import CHART_READER
from octavo.integrations.transformers.engine_images import has_vision
from octavo.integrations.transformers.load import (
    check_dtype,
    choose_device,
    default_dtype,
    loading,
)
from octavo.integrations.transformers.text_model import SMALL_MODEL, load_text_model
from octavo.integrations.transformers.tokenizer import PromptSettings, prepare_tokenizer

IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ServedModel:
    """A model with what makes its inputs; image_processor: None if it takes text alone."""

    name: str
    model: Any
    tokenizer: Any
    image_processor: Any


def load_served_model(
    name: str | None = None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    prompts: PromptSettings = PromptSettings(),
) -> ServedModel:
    """A model by name, as the engine serves it; None is SmolLM2, "chart-reader" the one of octavo.

    name: a folder, a hub name or a GGUF file. dtype: the checkpoint's own, or such as
    "bfloat16". device: the GPU if there is one. prompts: how texts and chats become tokens.
    """
    need(f"loading {name or SMALL_MODEL}", "transformers")
    if name is not None and CHART_READER.matches(name):
        return _load_reader(name, check_dtype(dtype), choose_device(device), prompts)
    loaded = load_text_model(name, dtype=dtype, device=device, prompts=prompts)
    processor = None
    if name is not None and has_vision(loaded.model):
        processor = _load_image_processor(name)
    return ServedModel(loaded.name, loaded.model, loaded.tokenizer, processor)


def _load_reader(name: str, dtype: str, device: str, prompts: PromptSettings) -> ServedModel:
    reader = CHART_READER.load(name, default_dtype(dtype, device)).to(device)
    tokenizer = prepare_tokenizer(reader.chat_tokenizer(), prompts, reader.model.config)
    return ServedModel(name, reader.model, tokenizer, reader.image_processor)


def _load_image_processor(name: str) -> Any:
    from transformers import AutoImageProcessor, Qwen2VLImageProcessorPil

    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in IMAGE_PROCESSOR_FILES):
        return None  # a folder of the language model alone: images are refused, by name
    need(f"reading images for {name}", "PIL")
    automatic: Any = AutoImageProcessor
    # All of the families have this one; older versions do not find it without torchvision.
    of_pillow: Any = Qwen2VLImageProcessorPil
    has_torchvision = find_spec("torchvision") is not None
    with loading(name, "an image processor (preprocessor_config.json) beside the model"):
        processors = automatic if has_torchvision else of_pillow
        return processors.from_pretrained(name, trust_remote_code=False)

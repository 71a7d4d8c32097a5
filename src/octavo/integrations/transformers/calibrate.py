"""Static scales for the vision tower of a transformers model: calibrated, or saved from a run."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.calibration.autosave import ScaleSaver
from octavo.calibration.data import ImagePrompt
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration, Subject
from octavo.calibration.run import calibrate as run_calibration
from octavo.calibration.scale_file import ScaleHeader, ScaleSet
from octavo.integrations.transformers.chart_reader import (
    FOLDER,
    is_chart_reader,
    load_chart_reader,
)
from octavo.integrations.transformers.load import (
    check_dtype,
    choose_device,
    dtype_name,
    load_weights,
    loading,
)
from octavo.integrations.transformers.observe import layer_names, observe
from octavo.integrations.transformers.vision import find_layers, scale_name

Inputs = Mapping[str, Any]

# Modules behind the layers that are calibrated, which checkpoints may lack.
UNUSED = ("lm_head", "pooler")


@dataclass(frozen=True)
class ImageModel:
    """A model with a vision tower, and the processor that makes its inputs of images."""

    name: str
    model: nn.Module
    processor: Any

    def encode(self, prompts: Sequence[ImagePrompt]) -> object:
        """Run the vision tower on all images of these prompts."""
        images = [image for prompt in prompts for image in prompt]
        return encode(self.model, self.processor(images=images, return_tensors="pt"))

    def subject(self) -> Subject[ImagePrompt]:
        """The vision tower as calibration takes it."""
        return Subject(
            name=self.name,
            dtype=dtype_name(self.model),
            kind="vision_attention",
            layers=layer_names(self.model),
            observe=partial(observe, self.model),
            forward=self.encode,
        )


def calibrate(
    model: nn.Module,
    batches: Iterable[Inputs],
    settings: CalibrationSettings | None = None,
) -> ScaleSet:
    """Static scales for a model's vision tower, from batches of its inputs (pixel_values, …).

    The model runs in its own dtype and is left as it was. `octavo calibrate` does the same with
    images, prints what was seen and can be resumed.
    """
    calibration = run_calibration(
        Calibration(layer_names(model), settings or CalibrationSettings()),
        lambda start: ([inputs] for inputs in batches),
        observe=partial(observe, model),
        forward=lambda batch: encode(model, batch[0]),
    )
    return calibration.result(ScaleHeader(kind="vision_attention")).scales


def autosave(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    margin: float = 1.5,
    model_name: str | None = None,
) -> ScaleSaver:
    """Save the scales of a model with dynamic FP8 attention once all layers have seen 16 passes.

    Layers are named as vLLM does for the Qwen families. Calls of the tower are counted, and its
    replays by VisionGraphs. `close` the result at the end of the run.
    """
    header = ScaleHeader(kind="vision_attention", model=model_name)
    return ScaleSaver(model, path, margin=margin, rename=scale_name, header=header).watch()


def encode(model: nn.Module, inputs: Inputs) -> object:
    """Run a model on inputs on its own device; of a model with text, the vision tower alone."""
    device = next(model.parameters()).device
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    features = getattr(model, "get_image_features", None)
    is_images_only = "pixel_values" in moved and "input_ids" not in moved
    if features is not None and is_images_only:
        return features(**moved)
    return model(**moved)


def load_image_model(
    name: str | None, *, dtype: str = "auto", device: str | None = None
) -> ImageModel:
    """A model and its image processor, from a folder or the hub; None is octavo's chart reader.

    dtype: the checkpoint's own, or such as "bfloat16". device: the GPU if there is one.
    """
    dtype, device = check_dtype(dtype), choose_device(device)
    if name is None or is_chart_reader(Path(name)):
        own = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        reader = load_chart_reader(FOLDER if name is None else Path(name), own).to(device)
        return ImageModel(reader.name, reader.model, reader.process_images)
    return _load_from_transformers(name, dtype, device)


def _load_from_transformers(name: str, dtype: str, device: str) -> ImageModel:
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoImageProcessor,
        AutoModel,
        AutoModelForImageTextToText,
    )

    image_processors: Any = AutoImageProcessor
    with loading(name, "a model with a config.json"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    with loading(name, "an image processor (preprocessor_config.json) beside the model"):
        processor = image_processors.from_pretrained(name, trust_remote_code=False)
    # The class that models are served with: its layer names are those of scale files.
    has_text = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind: Any = AutoModelForImageTextToText if has_text else AutoModel
    model = load_weights(name, kind, dtype=dtype, device=device, unused=UNUSED)
    find_layers(model)
    return ImageModel(name, model, processor)

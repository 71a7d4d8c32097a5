"""Static scales for the vision tower of a transformers model: calibrated, or saved from a run."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.brief import brief, list_names
from octavo.calibration.autosave import ScaleSaver, check_scale_paths
from octavo.calibration.data import ImageData, ImagePrompt, batches
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration, CalibrationResult, load_state
from octavo.calibration.run import calibrate as run_calibration
from octavo.calibration.scale_file import ScaleHeader, ScaleSet, save_scales
from octavo.calibration.state import StateFile, state_path
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.transformers.chart_reader import (
    FOLDER,
    is_chart_reader,
    load_chart_reader,
)
from octavo.integrations.transformers.observe import layer_names, observe
from octavo.integrations.transformers.vision import find_layers, scale_name

Inputs = Mapping[str, Any]

DTYPES = ("auto", "bfloat16", "float16", "float32")
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
        ([inputs] for inputs in batches),
        observe=partial(observe, model),
        forward=lambda batch: encode(model, batch[0]),
    )
    return calibration.result().scales


def calibrate_on_images(
    image_model: ImageModel,
    data: ImageData,
    save_path: str | os.PathLike[str],
    settings: CalibrationSettings,
    *,
    num_prompts: int = 100,
    batch_size: int = 1,
    save_every: int = 16,
    is_resumed: bool = True,
    on_prompts: Callable[[int], None] = lambda num_prompts: None,
) -> CalibrationResult:
    """Calibrate on the first prompts of `data` and write the scale file.

    The state of a run that ends too early lies beside the scale file, and the next run goes on from
    it unless is_resumed is False. on_prompts: called with the number of prompts so far.
    """
    check_scale_paths(is_fp8=True, save_path=save_path, margin=settings.margin)
    if num_prompts < 1:
        raise ConfigError(f"expected num_prompts from 1 on, got {num_prompts}")
    calibration = Calibration(layer_names(image_model.model), settings)
    state_file = StateFile(
        path=state_path(save_path),
        key=_state_key(image_model.name, data, settings),
        save_every=save_every,
    )
    if not is_resumed:
        state_file.remove()
    elif load_state(calibration, state_file):
        on_prompts(calibration.num_prompts)
    if calibration.num_prompts > num_prompts:
        raise ConfigError(
            f"{state_file.path} has seen {calibration.num_prompts} prompts: expected as many or "
            f"more, got {num_prompts}; start afresh"
        )
    prompts = data.prompts(num_prompts, start=calibration.num_prompts)
    run_calibration(
        calibration,
        batches(prompts, batch_size),
        observe=partial(observe, image_model.model),
        forward=image_model.encode,
        state_file=state_file,
        on_batch=on_prompts,
    )
    header = ScaleHeader(model=image_model.name[:1000], data=data.name[:1000])
    result = calibration.result(header)
    save_scales(save_path, result.scales)
    state_file.remove()
    return result


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
    header = ScaleHeader(model=model_name)
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
    if dtype not in DTYPES:
        raise ConfigError(f"expected a dtype, one of {', '.join(DTYPES)}, got {dtype!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UnsupportedError(f"expected a device that is here, cpu or a GPU, got {device!r}")
    if name is None or is_chart_reader(Path(name)):
        own = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        reader = load_chart_reader(FOLDER if name is None else Path(name), own).to(device)
        return ImageModel(reader.name, reader.model, reader.process_images)
    return _load_from_transformers(name, dtype, device)


def _load_from_transformers(name: str, dtype: str, device: str) -> ImageModel:
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    image_processors: Any = AutoImageProcessor
    with _loading(name, "a model with a config.json"):
        config = AutoConfig.from_pretrained(name)
    with _loading(name, "an image processor (preprocessor_config.json) beside the model"):
        processor = image_processors.from_pretrained(name)
    # The class that models are served with: its layer names are those of scale files.
    has_text = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind: Any = AutoModelForImageTextToText if has_text else AutoModel
    with _loading(name, "weights"):
        model, info = kind.from_pretrained(name, dtype=dtype, output_loading_info=True)
    find_layers(model)
    # transformers fills in random numbers and goes on.
    missing = [k for k in info["missing_keys"] if not any(u in k.split(".") for u in UNUSED)]
    if missing:
        raise CheckpointError(
            f"{name}: expected all of the model's weights, got none for {list_names(missing)}"
        )
    return ImageModel(name, model.eval().to(device), processor)


@contextmanager
def _loading(name: str, expected: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}: expected {expected}, got {type(error).__name__}: {brief(str(error))}"
        ) from error


def _state_key(model_name: str, data: ImageData, settings: CalibrationSettings) -> dict[str, str]:
    return {
        "model": model_name,
        "data": f"{data.name} ({data.fingerprint})",
        "observer": str(settings),
        "granularity": settings.granularity,
        "margin": f"{settings.margin:g}",
    }

"""Static scales for the vision tower of a transformers model: calibrated, or saved from a run."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo import ops
from octavo.calibration.autosave import ScaleSaver
from octavo.calibration.data import ImagePrompt
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration, See, Subject
from octavo.calibration.run import calibrate as run_calibration
from octavo.calibration.scale_file import ScaleHeader, ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.embedded_models import CHART_READER
from octavo.integrations.patch import Patch
from octavo.integrations.transformers.load import (
    check_dtype,
    choose_device,
    dtype_name,
    loading,
)
from octavo.integrations.transformers.load_stored import load_weights
from octavo.integrations.transformers.vision import PACKED, REFUSED, find_layers, scale_name
from octavo.internals import internals, require
from octavo.layers.encoder_attention import EncoderAttention
from octavo.numerics.attention import AttentionSpec, Packing

Inputs = Mapping[str, Any]

# Modules behind the layers that are calibrated, which checkpoints may lack.
UNUSED = ("lm_head", "pooler")
# With "flash" in the name, towers of packed images hand over all of them in one call per layer.
IMPLEMENTATION = "octavo_flash_observe"
_ATTRIBUTE = "octavo_see"


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
    if name is None or CHART_READER.matches(name):
        own = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        reader = CHART_READER.load(name, own).to(device)
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


def layer_names(model: nn.Module) -> list[str]:
    """What scale files call the attention layers of a model's vision tower."""
    return [scale_name(name) for name in find_layers(model)]


@contextmanager
def observe(model: nn.Module, see: See) -> Iterator[None]:
    """Call `see(name, q, k, v)` for every pass of every layer; attention stays in its own dtype.

    q, k and v are [batch, length, heads, head_dim], after rotary embedding: as FP8 attention would
    quantize them. The model is as it was when the context ends.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    with internals("transformers"):
        from transformers.masking_utils import flash_attention_mask

    require("transformers.PreTrainedConfig._attn_implementation")
    found = find_layers(model)
    if any(isinstance(module, EncoderAttention) for module in model.modules()):
        raise ConfigError(
            "expected a model as it was, got one that apply_ changed: restore_ it first"
        )
    if whisper := [n for n, module in found.items() if type(module).__name__ == "WhisperAttention"]:
        raise UnsupportedError(
            f"{whisper[0]}: expected a vision tower, got Whisper's encoder, which shares its "
            "config with the decoder: save the scales of a dynamic run"
        )
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, flash_attention_mask)
    with Patch() as patch:
        for name, module in found.items():
            patch.set(module, _ATTRIBUTE, (scale_name(name), see))
            patch.set(module.config, "_attn_implementation", IMPLEMENTATION)
        yield


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: q, k, v [batch, heads, length, head_dim] → [batch, length, …]."""
    name, see = getattr(module, _ATTRIBUTE)
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if attention_mask is not None or is_causal or dropout:
        raise UnsupportedError(
            f"{name}: expected images without padding, causal order or dropout, as FP8 attention "
            "takes them"
        )
    given = sorted(key for key in REFUSED if kwargs.get(key) is not None)
    if given or (cu_seq_lens_k is not None and cu_seq_lens_k is not cu_seq_lens_q):
        raise UnsupportedError(
            f"{name}: expected one cu_seq_lens and nothing that changes attention, got "
            f"{', '.join(given) or 'two cu_seq_lens'}"
        )
    if type(module).__name__ in PACKED and (cu_seq_lens_q is None or max_length_q is None):
        raise UnsupportedError(
            f"{name}: expected cu_seq_lens_q and max_length_q, which keep images apart, got none: "
            "update transformers"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    see(name, q, k, v)
    spec = AttentionSpec(softmax_scale=scaling)
    if cu_seq_lens_q is None or max_length_q is None:
        return ops.attention(q, k, v, spec), None
    packing = Packing.same(cu_seq_lens_q.to(torch.int32), int(max_length_q))
    out = ops.attention(q.squeeze(0), k.squeeze(0), v.squeeze(0), spec, packing=packing)
    return out.unsqueeze(0), None

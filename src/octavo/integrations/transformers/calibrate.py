"""Static scales for the attention of transformers models: calibrated, or saved from a run.

A decoder is watched through transformers' table of attention functions: ours shows q, k and v, then
calls what the model used before. A vision tower gets the layers that FP8 attention has, in BF16.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.autosave import ScaleSaver
from octavo.calibration.data import ImagePrompt
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration, See, Subject
from octavo.calibration.run import calibrate as run_calibration
from octavo.calibration.scale_file import ScaleHeader, ScaleSet
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.embedded_models import CHART_READER
from octavo.integrations.patch import Patch
from octavo.integrations.transformers import load, text, vision
from octavo.internals import internals, require
from octavo.layers.encoder_attention import EncoderAttention

Inputs = Mapping[str, Any]
Window = list[int]

# Modules behind the layers that are calibrated, which checkpoints may lack.
UNUSED = ("lm_head", "pooler")
_ATTRIBUTE = "octavo_see_text"


@dataclass(frozen=True)
class CapturedQkv:
    """What one attention call saw, rotary embedding included.

    q: [batch, length, num_heads, head_dim]; k, v: [batch, length, num_kv_heads, head_dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor


def capture_qkv(model: Any, input_ids: Tensor, layers: Iterable[int]) -> dict[int, CapturedQkv]:
    """One forward pass over input_ids [batch, length] without padding; what `layers` saw."""
    modules: dict[str, Any] = dict(text.find_layers(model))
    indices = {name: module.layer_idx for name, module in modules.items()}
    wanted = set(layers)
    if missing := sorted(wanted - set(indices.values())):
        raise ConfigError(f"expected layers 0 to {len(indices) - 1}, got {missing}")
    captured: dict[int, CapturedQkv] = {}

    def see(name: str, *qkv: Tensor) -> None:
        if (index := indices[name]) in wanted:
            captured[index] = CapturedQkv(*(x.clone() for x in qkv))

    with observe_text(model, see), torch.inference_mode():
        model(input_ids=input_ids, use_cache=False)
    return captured


@contextmanager
def observe_text(model: nn.Module, see: See) -> Iterator[None]:
    """Call `see(name, q, k, v)` for every pass of every attention layer of a decoder.

    q, k, v are [batch, length, heads, head_dim] after norms and rotary embedding, as a KV cache
    stores them. All positions are shown: batches come without padding, and without a cache.
    """
    require("transformers.PreTrainedConfig._attn_implementation")
    modules: dict[str, Any] = dict(text.find_layers(model))
    before = {name: module.config._attn_implementation for name, module in modules.items()}
    with Patch() as patch:
        for name, module in modules.items():
            attend = _attention_function(name, module, before[name])
            patch.set(module, _ATTRIBUTE, (name, see, attend))
            patch.set(module.config, "_attn_implementation", _register(before[name]))
        yield


def _attention_function(name: str, module: nn.Module, implementation: object) -> Any:
    """What the module would call; its own file may replace functions of the common table."""
    if not isinstance(implementation, str):
        raise ConfigError(f"{name}: expected the name of an attention function: {implementation}")
    if implementation.startswith("octavo"):
        raise ConfigError("expected a model in its own dtype, got one in FP8: restore_ it first")
    modeling = sys.modules[type(module).__module__]
    table = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    eager = getattr(modeling, "eager_attention_forward", None)
    if table is None or (implementation == "eager" and eager is None):
        raise UnsupportedError(
            f"{name}: expected attention by transformers' table, got {type(module).__name__}'s own"
        )
    return eager if implementation == "eager" else table[implementation]


def _register(implementation: str) -> str:
    """The observing name for an attention function; models look for words such as flash in it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    with internals("transformers"):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"octavo_observe_{implementation}"
    AttentionInterface.register(name, _show)
    # A name without a mask function gets no masks: as before, then.
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def _show(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What transformers calls: q, k, v [batch, heads, length, head_dim]."""
    name, see, attend = getattr(module, _ATTRIBUTE)
    if key.shape[-2] != query.shape[-2]:
        raise UnsupportedError(
            f"{name}: expected a pass without a cache, got {key.shape[-2]} keys for "
            f"{query.shape[-2]} queries: set use_cache=False"
        )
    see(name, *(x.transpose(1, 2) for x in (query, key, value)))
    return attend(module, query, key, value, *args, **kwargs)


@contextmanager
def observe_images(model: nn.Module, see: See) -> Iterator[None]:
    """Call `see(name, q, k, v)` for every pass of every layer of a vision tower.

    q, k and v are [batch, length, heads, head_dim] after rotary embedding, as FP8 quantizes them.
    """
    found = vision.find_layers(model)
    if any(isinstance(module, EncoderAttention) for module in model.modules()):
        raise ConfigError(
            "expected a model as it was, got one that apply_ changed: restore_ it first"
        )
    if whisper := [n for n, module in found.items() if type(module).__name__ == vision.WHISPER]:
        raise UnsupportedError(
            f"{whisper[0]}: expected a vision tower, got Whisper's encoder, which shares its "
            "config with the decoder: save the scales of a dynamic run"
        )
    vision.register(vision.IMPLEMENTATION, vision.attend)
    with Patch() as patch:
        for name, module in found.items():
            layer = vision.make_layer(name, module)
            layer.register_forward_pre_hook(_shows(vision.scale_name(name), see))
            patch.set(module, vision.CHILD, layer)
            patch.set(module.config, "_attn_implementation", vision.IMPLEMENTATION)
        yield


def _shows(name: str, see: See) -> Any:
    return lambda layer, qkv: see(name, *qkv)


def layer_names(model: nn.Module) -> list[str]:
    """What scale files call the attention layers of a model's vision tower."""
    return [vision.scale_name(name) for name in vision.find_layers(model)]


def image_subject(model: nn.Module, forward: Callable[..., object], name: str = "") -> Subject[Any]:
    """A model's vision tower as calibration takes it; forward: runs a batch."""
    return Subject(
        name=name,
        dtype=load.dtype_name(model),
        kind="vision_attention",
        layers=layer_names(model),
        observe=partial(observe_images, model),
        forward=forward,
    )


def text_subject(model: nn.Module, forward: Callable[..., object], name: str = "") -> Subject[Any]:
    """A decoder's attention layers as calibration takes them; forward: runs a batch."""
    return Subject(
        name=name,
        dtype=load.dtype_name(model),
        kind="kv_cache",
        layers=list(text.find_layers(model)),
        observe=partial(observe_text, model),
        forward=forward,
        is_nonfinite_refused=True,
        uncentered=text.find_uncentered(model),
    )


def run_windows(model: nn.Module, windows: Sequence[Window]) -> None:
    """Run a decoder, without its head, on windows of tokens; neighbours of one length at once."""
    _, decoder = text.find_decoder(model)
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    for _, group in groupby(windows, key=len):
        input_ids = torch.tensor(list(group), device=embeddings.weight.device)
        if int(input_ids.max()) >= embeddings.num_embeddings:
            raise CheckpointError(
                f"expected tokens below {embeddings.num_embeddings}, as the model has embeddings, "
                f"got {int(input_ids.max())}: the tokenizer is another model's"
            )
        decoder(input_ids=input_ids, use_cache=False)


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
        return image_subject(self.model, self.encode, self.name)


def calibrate(
    model: nn.Module, batches: Iterable[Inputs], settings: CalibrationSettings | None = None
) -> ScaleSet:
    """Static scales for a model's vision tower, from batches of its inputs (pixel_values, …).

    The model runs in its own dtype and is left as it was. `octavo calibrate` does the same with
    images, prints what was seen and can be resumed.
    """
    subject = image_subject(model, lambda batch: encode(model, batch[0]))
    return _calibrate(subject, batches, settings)


def calibrate_kv(
    model: nn.Module, batches: Iterable[Inputs], settings: CalibrationSettings | None = None
) -> ScaleSet:
    """Static scales for a language model's KV cache, from batches of its inputs (input_ids, …).

    The model runs in its own dtype, without a cache, and is left as it was. Positions that an
    attention_mask leaves out do not count. Centering keys takes two passes over the batches: a
    list then, no generator. `octavo calibrate --kv` does the same with texts and can be resumed.
    """
    subject = text_subject(model, lambda batch: run_inputs(model, batch[0]))
    return _calibrate(subject, batches, settings)


def _calibrate(
    subject: Subject[Inputs], batches: Iterable[Inputs], settings: CalibrationSettings | None
) -> ScaleSet:
    settings = settings or CalibrationSettings()
    if settings.center_keys and isinstance(batches, Iterator):
        raise ConfigError(
            "center_keys needs two passes: expected a list of batches, got a generator"
        )
    seen = _see(subject, batches, settings, is_nonfinite_refused=subject.is_nonfinite_refused)
    return seen.result(ScaleHeader(kind=subject.kind)).scales


def observe_windows(
    model: nn.Module,
    windows: Sequence[Window],
    settings: CalibrationSettings,
    *,
    on_window: Callable[[int], None] = lambda num_windows: None,
) -> Calibration:
    """What every attention layer saw in these windows; on_window: told how many are done."""
    return _see(text_subject(model, partial(run_windows, model)), windows, settings, on_window)


def _see(
    subject: Subject[Any],
    inputs: Iterable[Any],
    settings: CalibrationSettings,
    on_input: Callable[[int], None] = lambda num_inputs: None,
    *,
    is_nonfinite_refused: bool = False,
) -> Calibration:
    """What a subject's layers see while it runs each of these inputs by itself."""
    subject.check(settings)
    return run_calibration(
        Calibration(subject.layers, settings, is_nonfinite_refused=is_nonfinite_refused),
        lambda start: ([one] for one in inputs),
        observe=subject.observe,
        forward=subject.forward,
        on_batch=on_input,
    )


def autosave(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    margin: float = 1.5,
    model_name: str | None = None,
) -> ScaleSaver:
    """Save the scales of a model with dynamic FP8 attention once all layers have seen 16 passes.

    Calls of the tower count, and its replays by VisionGraphs. `close` the result at the end.
    """
    header = ScaleHeader(kind="vision_attention", model=model_name)
    return ScaleSaver(model, path, margin=margin, rename=vision.scale_name, header=header).watch()


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
    own, device = load.torch_dtype(dtype), load.choose_device(device)
    if name is None or CHART_READER.matches(name):
        reader = CHART_READER.load(name, own).to(device)
        return ImageModel(reader.name, reader.model, reader.image_processor)
    kind = load.served_class(load.load_config(name), without_text="AutoModel")
    processor = load.load_part("AutoImageProcessor", name, load.IMAGE_PROCESSOR)
    model = load.load_weights(name, kind, dtype=dtype, device=device, unused=UNUSED)
    vision.find_layers(model)
    return ImageModel(name, model, processor)


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

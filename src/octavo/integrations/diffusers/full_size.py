"""Diffusion transformers in the sizes of well-known models: weights, inputs, and a step's work.

They are diffusers' own classes with random weights: what a step costs does not depend on what was
learned. Its work, and the sizes of linear layers, are also known from a folder's config alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AttentionBackendName
from torch import Tensor, nn

from octavo import ops
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.checkpoints.tensor_files import read_json
from octavo.integrations.diffusers.attention import add_backend, find_layers
from octavo.integrations.diffusers.linear import kept_layers
from octavo.integrations.linear import plan_linear
from octavo.integrations.traced_work import AttentionWork, LinearWork, trace
from octavo.internals import require

require("diffusers.models.attention.AttentionModuleMixin._attention_backend")

CONFIG, INDEX = "config.json", "model_index.json"
Inputs = dict[str, Any]
# Draws a tensor of a shape in the model's dtype, on its device.
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class FullSize:
    """One model's transformer: diffusers' class, the inputs of one step, the class's arguments.

    layers: those of the arguments that count blocks.
    """

    kind: str
    layers: tuple[str, ...]
    about: str
    make_inputs: Callable[..., Inputs]
    config: Mapping[str, Any] = field(default_factory=dict)


def _flux_inputs(draw: Draw, side: int = 64, num_words: int = 512, width: int = 4096) -> Inputs:
    place = torch.arange(side, dtype=torch.float32)
    y, x = torch.meshgrid(place, place, indexing="ij")
    ids = torch.stack((torch.zeros_like(x), y, x), -1)
    return {
        "hidden_states": draw(1, side**2, 64),
        "encoder_hidden_states": draw(1, num_words, width),
        "pooled_projections": draw(1, 768),
        "timestep": 0 * draw(1) + 0.5,
        "guidance": 0 * draw(1) + 3.5,
        "img_ids": ids.reshape(-1, 3).to(draw(1).device),
        "txt_ids": torch.zeros(num_words, 3, device=draw(1).device),
    }


def _qwen_inputs(draw: Draw, side: int = 64, num_words: int = 512, width: int = 3584) -> Inputs:
    return {
        "hidden_states": draw(1, side**2, 64),
        "encoder_hidden_states": draw(1, num_words, width),
        "timestep": 0 * draw(1) + 0.5,
        "img_shapes": [[(1, side, side)]],
    }


def _wan_inputs(
    draw: Draw, size: tuple[int, int, int] = (21, 90, 160), num_words: int = 512, width: int = 4096
) -> Inputs:
    return {
        "hidden_states": draw(1, 16, *size),
        "encoder_hidden_states": draw(1, num_words, width),
        "timestep": 0 * draw(1) + 500,
    }


_FLUX = ("FluxTransformer2DModel", ("num_layers", "num_single_layers"))
_QWEN = ("QwenImageTransformer2DModel", ("num_layers",))
_WAN = ("WanTransformer3DModel", ("num_layers",))
_TINY = {"attention_head_dim": 32, "num_attention_heads": 2, "num_layers": 1}
_TINY_JOINT = {**_TINY, "joint_attention_dim": 64, "axes_dims_rope": (8, 12, 12)}
_TINY_INPUTS: dict[str, Any] = {"num_words": 16, "width": 64}
_PICTURE = "1024 x 1024, 4096 + 512 tokens"
FULL_SIZES: Mapping[str, FullSize] = {
    "flux.1-dev": FullSize(*_FLUX, _PICTURE, _flux_inputs, {"guidance_embeds": True}),
    "qwen-image": FullSize(*_QWEN, _PICTURE, _qwen_inputs),
    "wan2.2-14b": FullSize(*_WAN, "720 x 1280, 81 frames, 75600 tokens", _wan_inputs),
    "tiny-flux": FullSize(
        *_FLUX,
        "64 + 16 tokens",
        partial(_flux_inputs, side=8, **_TINY_INPUTS),
        {**_TINY_JOINT, "num_single_layers": 1, "guidance_embeds": True},
    ),
    "tiny-qwen": FullSize(
        *_QWEN, "64 + 16 tokens", partial(_qwen_inputs, side=8, **_TINY_INPUTS), _TINY_JOINT
    ),
    "tiny-wan": FullSize(
        *_WAN,
        "72 tokens",
        partial(_wan_inputs, size=(2, 12, 12), **_TINY_INPUTS),
        {**_TINY, "text_dim": 64, "ffn_dim": 128},
    ),
}


def find_full_size(name: str) -> FullSize:
    """The size of this name."""
    if name not in FULL_SIZES:
        raise ConfigError(f"expected a size of {', '.join(FULL_SIZES)}; got {name!r}")
    return FULL_SIZES[name]


def make_transformer(
    size: FullSize, device: torch.device, *, num_layers: int | None = None, seed: int = 0
) -> Any:
    """The transformer in bfloat16, but for what its class keeps in float32.

    num_layers: so many of each kind of block instead of all.
    """
    config = dict(size.config)
    if num_layers is not None:
        config |= dict.fromkeys(size.layers, num_layers)
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(diffusers, size.kind)(**config)
    cast_to_bf16_(model)
    return model.eval()


def cast_to_bf16_(model: nn.Module) -> None:
    """Cast a model's parameters, but for what its class keeps in float32."""
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.bfloat16()


def make_inputs(size: FullSize, device: torch.device, seed: int = 0) -> Inputs:
    """Random inputs of one step; the result is a tuple."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    return {**size.make_inputs(draw), "return_dict": False}


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that diffusers compiles one by one, and that repeat, by name."""
    kinds = getattr(model, "_repeated_blocks", None) or ()
    found = {n: m for n, m in model.named_modules() if type(m).__name__ in kinds}
    if not found:
        raise ConfigError(f"expected repeated blocks, got none in {type(model).__name__}")
    return found


def use_bf16_attention_(model: nn.Module, name: str) -> None:
    """Let a model attend in its own dtype: by "native" or "cudnn" of torch, or one of our impls.

    An impl is one of `ops.attention`, such as a peer's that a benchmark has registered.
    """
    backends = {"native": "native", "cudnn": "_native_cudnn"}

    def plain_attention(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        asked = [n for n, given in options.items() if isinstance(given, Tensor) or given]
        if asked:
            raise ConfigError(f"{name}: expected plain attention, got {', '.join(asked)}")
        return ops.attention(query, key, value, impl=name)

    if name in backends:
        member = AttentionBackendName(backends[name])
    else:
        member = add_backend(f"octavo_bf16_{name}", plain_attention)
    layers: Mapping[str, Any] = find_layers(model)
    for layer in layers.values():
        layer.processor._attention_backend = member


def read_linear_shapes(path: Path) -> list[tuple[int, int]]:
    """Inputs and outputs (K, N) of the layers that FP8 reaches by default, each size once.

    path: a transformer's folder or config.json, or a pipeline's folder, whose transformers count.
    """
    files = [path / CONFIG] if path.is_dir() else [path]
    if (path / INDEX).is_file():
        files = sorted(path.glob(f"transformer*/{CONFIG}"))
    shapes: dict[tuple[int, int], None] = {}
    for file in files:
        model = make_on_meta(file)
        for name in plan_linear(model, (), kept_layers(model)).chosen:
            layer: Any = model.get_submodule(name)
            shapes[layer.in_features, layer.out_features] = None
    if not shapes:
        raise CheckpointError(f"{path}: expected a pipeline with a transformer, got none")
    return list(shapes)


def make_on_meta(file: Path) -> nn.Module:
    """The model of a config, without memory for its weights."""
    config = read_json(file)
    if config is None:
        raise CheckpointError(f"expected a model's config.json at {file}, got none")
    kind: Any = getattr(diffusers, str(config.get("_class_name")), None)
    is_model = isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)
    if not is_model:
        raise CheckpointError(
            f"{file}: expected the _class_name of a model of diffusers, got "
            f"{config.get('_class_name')!r}"
        )
    with torch.device("meta"):
        made: nn.Module = kind.from_config(config)
    return made


@dataclass(frozen=True)
class StepWork:
    """One step: every linear layer that runs, and every attention call."""

    about: str
    linear: tuple[LinearWork, ...]
    attention: tuple[AttentionWork, ...]
    weight_bytes: int  # in BF16
    kept: dict[str, str]  # linear layers that stay by default: why
    makes_video: bool = False

    @property
    def fp8_weight_bytes(self) -> int:
        """With linear layers in FP8 where a recipe reaches."""
        reached = [one for one in self.linear if one.is_reached]
        return self.weight_bytes - sum(one.num_weights - 4 * one.outputs for one in reached)


def named_step(name: str, num_layers: Sequence[int] = ()) -> StepWork:
    """That of a name of `FULL_SIZES`.

    num_layers: so many blocks of each kind, or one number for all of them; () is all blocks.
    """
    size = find_full_size(name)
    known = inspect.signature(getattr(diffusers, size.kind).__init__).parameters
    config = {arg: known[arg].default for arg in size.layers} | dict(size.config)
    if len(num_layers) not in (0, 1, len(size.layers)):
        raise ConfigError(
            f"{name}: expected numbers of {', '.join(size.layers)}, got {list(num_layers)}"
        )
    counts = list(num_layers) or [config[arg] for arg in size.layers]
    counts *= len(size.layers) // len(counts)
    return _step_work(make_transformer(size, torch.device("meta"), num_layers=1), size, counts)


def step_of_folder(folder: Path) -> StepWork:
    """That of a pipeline's folder or of its transformer's, with inputs as large as we know of."""
    file = folder / CONFIG
    if (folder / INDEX).is_file():
        file = folder / "transformer" / CONFIG
    model = make_on_meta(file)
    known = {size.kind: size for name, size in FULL_SIZES.items() if not name.startswith("tiny")}
    kind = type(model).__name__
    if kind not in known:
        raise UnsupportedError(
            f"{file}: expected a transformer whose inputs are known, one of "
            f"{', '.join(known)}; got {kind}"
        )
    cast_to_bf16_(model)
    return _step_work(model, known[kind], None)


@torch.no_grad()
def _step_work(model: Any, size: FullSize, counts: Sequence[int] | None) -> StepWork:
    """counts: of a model with one block of each kind, how many there would be."""

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    places = {name: name.rpartition(".")[0] for name in repeated_blocks(model)}
    times = dict(zip(dict.fromkeys(places.values()), counts, strict=True)) if counts else {}
    width = getattr(model.config, "joint_attention_dim", None) or model.config.text_dim
    inputs = size.make_inputs(draw, width=width)
    kept = kept_layers(model)
    chosen = plan_linear(model, (), kept).chosen
    seen = trace(model, lambda: model(**inputs, return_dict=False), places)

    def count(name: str) -> int:
        return next((n for place, n in times.items() if name.startswith(place)), 1)

    linear = [
        replace(one, is_reached=one.name in chosen)
        for one in seen.linear
        for _ in range(count(one.name))
    ]
    attention = [call for call in seen.attention for _ in range(count(call.place))]
    num_weights = sum(p.numel() * count(name) for name, p in model.named_parameters())
    # So diffusers calls all transformers of videos, and no others.
    makes_video = type(model).__name__.endswith("Transformer3DModel")
    return StepWork(size.about, tuple(linear), tuple(attention), 2 * num_weights, kept, makes_video)

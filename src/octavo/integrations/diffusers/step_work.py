"""What a diffusion transformer computes in a step, and its linear layers, from its config alone."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.diffusers.defaults import kept_layers
from octavo.integrations.diffusers.full_size import (
    FULL_SIZES,
    FullSize,
    cast_to_bf16_,
    find_full_size,
    make_transformer,
    repeated_blocks,
)
from octavo.integrations.linear import plan_linear
from octavo.integrations.traced_work import AttentionWork, LinearWork, trace

CONFIG, INDEX = "config.json", "model_index.json"


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
        chosen = plan_linear(model, (), kept_layers(model)).chosen
        for name in chosen:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            shapes[layer.in_features, layer.out_features] = None
    if not shapes:
        raise CheckpointError(f"{path}: expected a pipeline with a transformer, got none")
    return list(shapes)


def make_on_meta(file: Path) -> nn.Module:
    """The model of a config, without memory for its weights."""
    import diffusers

    config = _read(file)
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


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"expected a model's config.json at {file}, got: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected an object, got {type(config).__name__}")
    return config


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
    """That of a name of `full_size.FULL_SIZES`.

    num_layers: so many blocks of each kind, or one number for all of them; () is all blocks.
    """
    import diffusers

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

    lists = dict.fromkeys(name.rpartition(".")[0] for name in repeated_blocks(model))
    times = dict(zip(lists, counts, strict=True)) if counts else {}
    width = getattr(model.config, "joint_attention_dim", None) or model.config.text_dim
    inputs: Any = size.make_inputs
    kept = kept_layers(model)
    chosen = plan_linear(model, (), kept).chosen
    places = {name: name.rpartition(".")[0] for name in repeated_blocks(model)}
    seen = trace(model, lambda: model(**inputs(draw, width=width), return_dict=False), places)

    def count(name: str) -> int:
        return next((n for place, n in times.items() if name.startswith(place)), 1)

    linear: list[LinearWork] = []
    for one in seen.linear:
        linear += [replace(one, is_reached=one.name in chosen)] * count(one.name)
    attention: list[AttentionWork] = []
    for call in seen.attention:
        attention += [call] * count(call.place)
    num_weights = sum(p.numel() * count(name) for name, p in model.named_parameters())
    # So diffusers calls all transformers of videos, and no others.
    makes_video = type(model).__name__.endswith("Transformer3DModel")
    return StepWork(size.about, tuple(linear), tuple(attention), 2 * num_weights, kept, makes_video)

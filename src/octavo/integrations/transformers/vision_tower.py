"""Vision towers by themselves: from a config or a model's folder, and inputs of any image size."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.checkpoints.tensor_files import read_headers, read_tensor
from octavo.integrations.patch import Patch
from octavo.integrations.transformers import vision
from octavo.integrations.transformers.fused_vision import PACKED_TOWERS
from octavo.integrations.transformers.load import load_config, loading
from octavo.internals import require
from octavo.numerics.attention import Packing

_QWEN3_VL: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
# Large patches: a 4K image has as few tokens as a CPU can attend to.
TINY: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 144,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": 64,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,
    "in_channels": 1,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
# Name -> (model_type of the vision config, its sizes).
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3-vl-30b-a3b": ("qwen3_vl_moe_vision", {**_QWEN3_VL, "out_hidden_size": 2048}),
    "qwen3-vl-8b": ("qwen3_vl_vision", {**_QWEN3_VL, "out_hidden_size": 4096}),
    "tiny": ("qwen3_vl_vision", TINY),
}
# Standard deviation of the logits of a tower with random weights: a peaked softmax, where errors
# of queries and keys count; as initialised, every key would get nearly the same weight. More would
# be too much: random values do not depend on keys, so nothing of a wrong weight averages out.
# Rounding queries and keys to e4m3 is an error of 0.04 at 1 and 0.08 at 2, and attention in FP8 is
# allowed 0.07.
LOGIT_STD = 1.5

# Arguments by position, those by name, and the result.
Recorded = tuple[tuple[Any, ...], dict[str, Any], Tensor]
PackedAttention = Callable[[Tensor, Tensor, Tensor, Packing], Tensor]


@dataclass(frozen=True)
class Tower:
    """A vision tower, what to call it, and whether its weights are a "checkpoint"'s or "random"."""

    name: str
    module: Any
    weights: str

    @property
    def num_layers(self) -> int:
        """How many blocks it has."""
        return len(self.module.blocks)


def make_tower(name: str, device: torch.device, *, num_layers: int | None = None) -> Tower:
    """A tower of CONFIGS in BF16 with random weights, `num_layers` deep or as deep as it is."""
    return Tower(name, _build(named_config(name), device, num_layers), "random")


def named_config(name: str) -> Any:
    """The vision config of a name of CONFIGS."""
    if name not in CONFIGS:
        raise ConfigError(f"expected a config, one of {', '.join(CONFIGS)}; got {name!r}")
    from transformers import AutoConfig

    model_type, sizes = CONFIGS[name]
    return AutoConfig.for_model(model_type, **sizes)


def open_tower(folder: Path, device: torch.device, *, num_layers: int | None = None) -> Tower:
    """The tower of a model's folder, in BF16; with random weights if there is only a config."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"expected a model's folder with a config.json, got {folder}")
    config = load_config(str(folder))
    files = sorted(folder.glob("*.safetensors"))
    if files and num_layers is not None:
        raise ConfigError(
            f"{folder} has weights for every layer: expected no number of layers, got {num_layers}"
        )
    own = getattr(config, "vision_config", config)
    module = _build(own, device, num_layers, is_sharpened=not files)
    if files:
        with loading(folder, "weights of a vision tower"):
            _load(module, files)
    return Tower(folder.resolve().name, module, "checkpoint" if files else "random")


def _build(
    config: Any, device: torch.device, num_layers: int | None, is_sharpened: bool = True
) -> Any:
    depth = getattr(config, "depth", 0)
    if num_layers is not None and not 1 <= num_layers <= depth:
        raise ConfigError(f"expected 1 to {depth} layers, got {num_layers}")
    with torch.random.fork_rng(), device:
        torch.manual_seed(0)
        tower = tower_of(config, num_layers)
    tower.requires_grad_(False)
    if is_sharpened:
        _sharpen(tower)
    return tower


def tower_of(config: Any, num_layers: int | None = None) -> Any:
    """The tower of a vision config, in BF16, with num_layers in place of all of them."""
    from transformers import AutoModel

    if not hasattr(config, "depth"):
        raise _not_packed(config)
    if num_layers is not None:
        config.depth = num_layers
        if indexes := getattr(config, "deepstack_visual_indexes", None):
            config.deepstack_visual_indexes = [i for i in indexes if i < num_layers]
    towers: Any = AutoModel
    tower = towers.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval()
    if type(tower).__name__ not in PACKED_TOWERS:
        raise _not_packed(tower)
    return tower


def _not_packed(got: object) -> UnsupportedError:
    return UnsupportedError(
        f"expected a tower of packed images, one of {', '.join(PACKED_TOWERS)}; got "
        f"{type(got).__name__}"
    )


@torch.no_grad()
def _sharpen(tower: Any) -> None:
    """Scale the random projections of queries and keys so that the softmax is peaked."""
    for block in tower.blocks:
        weight = block.attn.qkv.weight
        of_qk = weight[: 2 * weight.shape[1]]
        # Of normalised inputs: logits have the variance of a query's element, squared.
        std = float(of_qk.float().std()) * math.sqrt(weight.shape[1])
        of_qk *= math.sqrt(LOGIT_STD) / std


def _load(tower: nn.Module, files: Sequence[Path]) -> None:
    """Fill a tower with its weights, wherever in a model's files they lie."""
    wanted, entries = tower.state_dict(), read_headers(files)
    first = next(iter(wanted))
    places = (key for key in entries if key.endswith(f".{first}") and "vis" in key)
    prefix = next(places, first).removesuffix(first)
    if missing := sorted(name for name in wanted if prefix + name not in entries):
        raise CheckpointError(
            f"expected weights of the vision tower such as {first}, got none for "
            f"{len(missing)} of {len(wanted)}, such as {missing[0]}"
        )
    tower.load_state_dict({name: read_tensor(entries[prefix + name]) for name in wanted})


def twin(tower: nn.Module) -> Any:
    """A tower with the same weights in memory, and attention settings of its own."""
    shared = {id(p): p for p in tower.parameters()}
    return copy.deepcopy(tower, memo=shared)


def resized(height: int, width: int, unit: int) -> tuple[int, int]:
    """The size that Qwen's image processors give an image: multiples of `unit`, at least one."""
    # Python rounds halves to even, as they do: 720 becomes 704 for a unit of 32.
    return max(unit, round(height / unit) * unit), max(unit, round(width / unit) * unit)


def make_pixels(
    tower: Any, sizes: Sequence[tuple[int, int]], *, seed: int = 0
) -> dict[str, Tensor]:
    """hidden_states [patches, values] and grid_thw [images, 3] of random (height, width) images."""
    config = tower.config
    patch, merge = config.patch_size, config.spatial_merge_size
    grids = []
    for size in sizes:
        height, width = resized(*size, patch * merge)
        grids.append([1, height // patch, width // patch])
    channels = getattr(config, "in_channels", 3)
    num_values = channels * config.temporal_patch_size * patch**2
    parameter = next(tower.parameters())
    generator = torch.Generator(parameter.device).manual_seed(seed)
    shape = (sum(math.prod(grid) for grid in grids), num_values)
    pixels = torch.randn(shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
    return {"hidden_states": pixels, "grid_thw": torch.tensor(grids, device=parameter.device)}


def use_attention(tower: Any, name: str, attend: PackedAttention | None = None) -> None:
    """Let a tower attend by one of transformers' functions, or by one that takes packed tensors.

    attend: takes q, k, v [tokens, heads, head_dim] and their packing.
    """
    require("transformers.PreTrainedConfig._attn_implementation")
    if attend is None:
        tower.config._attn_implementation = name
        return

    def call(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        packing = Packing.same(cu_seq_lens_q.to(torch.int32), int(max_length_q))
        return attend(q, k, v, packing).unsqueeze(0), None

    # A name with "flash" in it makes towers hand over all images in one call.
    registered = f"octavo_flash_{name}"
    vision.register(registered, call)
    tower.config._attn_implementation = registered


@contextmanager
def recorded_calls(tower: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Recorded]]:
    """Arguments and results of some modules' calls, by name, while a tower runs."""
    calls: dict[str, Recorded] = {}
    with Patch() as patch:
        for name in names:
            hook = partial(_record, calls, name)
            module = tower.get_submodule(name)
            patch.hook(module.register_forward_hook(hook, with_kwargs=True))
        yield calls


def _record(
    calls: dict[str, Recorded], name: str, _: object, args: Any, kwargs: Any, result: Tensor
) -> None:
    calls[name] = (args, kwargs, result)

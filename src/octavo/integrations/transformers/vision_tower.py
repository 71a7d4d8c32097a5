"""Vision towers by themselves: from a config or a model's folder, and inputs of any image size."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.brief import list_names
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.checkpoints.tensor_files import FLOAT_DTYPES
from octavo.integrations.transformers.load import loading
from octavo.internals import internals, require
from octavo.numerics.attention import Packing

# Towers that take the packed patches of all images: (hidden_states, grid_thw).
PACKED_TOWERS = (
    "Glm4vVisionModel",
    "Qwen2VisionTransformerPretrainedModel",
    "Qwen2_5_VisionTransformerPretrainedModel",
    "Qwen3VLMoeVisionModel",
    "Qwen3VLVisionModel",
    "Qwen3_5MoeVisionModel",
    "Qwen3_5VisionModel",
)
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
# Name -> (model_type of the vision config, its sizes).
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3-vl-30b-a3b": ("qwen3_vl_moe_vision", {**_QWEN3_VL, "out_hidden_size": 2048}),
    "qwen3-vl-8b": ("qwen3_vl_vision", {**_QWEN3_VL, "out_hidden_size": 4096}),
    # Large patches: a 4K image has as few tokens as a CPU can attend to.
    "tiny": (
        "qwen3_vl_vision",
        {
            **_QWEN3_VL,
            "depth": 2,
            "hidden_size": 144,
            "num_heads": 2,
            "intermediate_size": 64,
            "patch_size": 64,
            "temporal_patch_size": 1,
            "in_channels": 1,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
}
# Standard deviation of the logits of a tower with random weights: a peaked softmax, where errors
# of queries and keys count. As initialised, every key would get nearly the same weight. Not more
# peaked, either: values of random weights do not depend on keys, so nothing of a wrong weight
# averages out. Rounding queries and keys to e4m3 is an error of 0.04 at 1 and 0.08 at 2, which
# alone is more than the 0.07 that attention in FP8 is allowed.
LOGIT_STD = 1.5

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


def make_tower(
    name: str, device: torch.device, *, num_layers: int | None = None, seed: int = 0
) -> Tower:
    """A tower of CONFIGS in BF16 with random weights, `num_layers` deep or as deep as it is."""
    if name not in CONFIGS:
        raise ConfigError(f"expected a config, one of {', '.join(CONFIGS)}; got {name!r}")
    from transformers import AutoConfig

    model_type, sizes = CONFIGS[name]
    config = AutoConfig.for_model(model_type, **sizes)
    return Tower(name, _build(config, device, num_layers, seed), "random")


def open_tower(
    folder: Path, device: torch.device, *, num_layers: int | None = None, seed: int = 0
) -> Tower:
    """The tower of a model's folder, in BF16; with random weights if there is only a config."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"expected a model's folder with a config.json, got {folder}")
    with loading(folder, "a model's config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    vision = getattr(config, "vision_config", config)
    files = sorted(folder.glob("*.safetensors"))
    if files and num_layers is not None:
        raise ConfigError(
            f"{folder} has weights for every layer: expected no number of layers, got {num_layers}"
        )
    module = _build(vision, device, num_layers, seed, is_sharpened=not files)
    if files:
        with loading(folder, "weights of a vision tower"):
            _load(module, files)
    return Tower(folder.resolve().name, module, "checkpoint" if files else "random")


def _build(
    config: Any,
    device: torch.device,
    num_layers: int | None,
    seed: int,
    is_sharpened: bool = True,
) -> Any:
    from transformers import AutoModel

    if num_layers is not None:
        depth = getattr(config, "depth", 0)
        if not 1 <= num_layers <= depth:
            raise ConfigError(f"expected 1 to {depth} layers, got {num_layers}")
        config.depth = num_layers
        if getattr(config, "deepstack_visual_indexes", None):
            kept = [i for i in config.deepstack_visual_indexes if i < num_layers]
            config.deepstack_visual_indexes = kept
    with torch.random.fork_rng(), device:
        torch.manual_seed(seed)
        towers: Any = AutoModel
        tower = towers.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval()
    if type(tower).__name__ not in PACKED_TOWERS:
        raise UnsupportedError(
            f"expected a tower of packed images, one of {', '.join(PACKED_TOWERS)}; got "
            f"{type(tower).__name__}"
        )
    tower.requires_grad_(False)
    if is_sharpened:
        _sharpen(tower)
    return tower


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
    from safetensors import safe_open

    wanted = tower.state_dict()
    first = next(iter(wanted))
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  (not a mapping)
                name = next((name for name in _endings(key) if name in wanted), None)
                if name is not None:
                    found[name] = opened.get_tensor(key)
    if quantized := [n for n, x in found.items() if x.dtype not in FLOAT_DTYPES.values()]:
        raise CheckpointError(
            "expected a vision tower whose weights are plain, got "
            f"{found[quantized[0]].dtype} without its scales for {list_names(quantized)}"
        )
    if missing := sorted(wanted.keys() - found.keys()):
        raise CheckpointError(
            f"expected weights of the vision tower such as {first}, got none for "
            f"{len(missing)} of {len(wanted)}, such as {missing[0]}"
        )
    tower.load_state_dict(found)


def _endings(key: str) -> Iterator[str]:
    """A weight's name in the whole model, then without what stands before the tower's own."""
    parts = key.split(".")
    is_vision = any("vis" in part for part in parts)
    for start in range(3 if is_vision else 1):
        yield ".".join(parts[start:])


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
    """What a tower takes for random images of these (height, width), in its dtype, on its device.

    The result has hidden_states [patches, values] and grid_thw [images, 3].
    """
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

    attend: takes q, k, v [tokens, heads, head_dim] and their packing; called with 1/√head_dim.
    """
    require("transformers.PreTrainedConfig._attn_implementation")
    if attend is None:
        tower.config._attn_implementation = name
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    with internals("transformers"):
        from transformers.masking_utils import flash_attention_mask

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
    AttentionInterface.register(registered, call)
    AttentionMaskInterface.register(registered, flash_attention_mask)
    tower.config._attn_implementation = registered


@contextmanager
def recorded_calls(
    tower: nn.Module, names: Sequence[str]
) -> Iterator[dict[str, tuple[tuple[Any, ...], dict[str, Any], Tensor]]]:
    """Arguments and results of some modules' calls, by name, while a tower runs."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: Any, args: Any, kwargs: Any, result: Tensor) -> None:
            calls[name] = (args, kwargs, result)

        return record

    modules = [(name, tower.get_submodule(name)) for name in names]
    handles = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()

"""What a vision tower computes for each patch, from its config alone."""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.traced_work import LinearWork, trace
from octavo.integrations.transformers.vision_tower import CONFIGS, PACKED_TOWERS, resized
from octavo.internals import require

# Patches of a side of the image that is traced: what is counted grows with their number.
_SIDE = 8


@dataclass(frozen=True)
class TowerWork:
    """A vision tower; linear: of all its layers, with `rows` for each patch of an image.

    attention_bytes, other_bytes: read and written by ops of one block that are no products, for
    each patch: inside attention (splitting, rotating, casting), and outside (norms, sums,
    activations), as transformers runs them without a compiler.
    """

    depth: int
    num_heads: int
    head_dim: int
    unit: int  # pixels that sides of an image are multiples of
    patch: int
    linear: tuple[tuple[LinearWork, float], ...]  # with rows for each patch
    attention_bytes: float
    other_bytes: float
    weight_bytes: int

    def num_patches(self, height: int, width: int) -> int:
        """Of an image of this size, after it is made a multiple of the unit."""
        rows, columns = resized(height, width, self.unit)
        return (rows // self.patch) * (columns // self.patch)


def named_tower(name: str) -> TowerWork:
    """That of a name of `vision_tower.CONFIGS`."""
    from transformers import AutoConfig

    if name not in CONFIGS:
        raise ConfigError(f"expected a tower of {', '.join(CONFIGS)}; got {name!r}")
    kind, sizes = CONFIGS[name]
    return tower_of_config(AutoConfig.for_model(kind, **sizes))


@torch.no_grad()
def tower_of_config(config: Any) -> TowerWork:
    """That of a vision config of transformers: one block is run, on a small image."""
    from transformers import AutoModel

    if not hasattr(config, "depth"):
        raise UnsupportedError(
            f"expected the config of a tower of packed images, one of {', '.join(PACKED_TOWERS)}; "
            f"got {type(config).__name__}"
        )
    require("transformers.PreTrainedConfig._attn_implementation")
    config, depth = copy.deepcopy(config), config.depth
    indexes = getattr(config, "deepstack_visual_indexes", None) or []
    config.depth, config._attn_implementation = 1, "sdpa"
    if indexes:
        config.deepstack_visual_indexes = [0]
    towers: Any = AutoModel
    with torch.device("meta"):
        tower = towers.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval()
    if type(tower).__name__ not in PACKED_TOWERS:
        raise UnsupportedError(
            f"expected a tower of packed images, one of {', '.join(PACKED_TOWERS)}; got "
            f"{type(tower).__name__}"
        )
    # Positions are computed from numbers of the grid, which the meta device has not; what the
    # weights are does not matter.
    tower = tower.to_empty(device="cpu")
    num_values = tower.patch_embed.proj.weight[0].numel()
    pixels = torch.zeros(_SIDE**2, num_values, dtype=torch.bfloat16)
    grid = torch.tensor([[1, _SIDE, _SIDE]])
    places = {"blocks.0": "block", "blocks.0.attn": "attention"}
    seen = trace(tower, lambda: tower(pixels, grid_thw=grid), places, has_bytes=True)
    counts = {True: depth, False: 1}
    linear = []
    for one in seen.linear:
        is_deep = one.name.startswith("deepstack")
        count = len(indexes) if is_deep else counts[one.name.startswith("blocks.")]
        linear += [(one, one.rows / _SIDE**2)] * count
    heads = seen.attention[0]
    return TowerWork(
        depth=depth,
        num_heads=heads.num_heads,
        head_dim=heads.head_dim,
        unit=config.patch_size * config.spatial_merge_size,
        patch=config.patch_size,
        linear=tuple(linear),
        attention_bytes=seen.other_bytes["attention"] / _SIDE**2,
        other_bytes=seen.other_bytes["block"] / _SIDE**2,
        weight_bytes=2 * sum(one.num_weights for one, _ in linear),
    )

"""What from_pretrained reports of a checkpoint: weights that it lacks, scales that nobody took."""

from collections.abc import Collection, Mapping
from typing import Any

from octavo.brief import list_names
from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.linear_layers import find_scales, kv_scale_names


def check_taken(
    info: Mapping[str, Any], unused: Collection[str] = (), *, has_kv_scales: bool = True
) -> None:
    """Raise if a model lacks weights, or left scales of its checkpoint behind.

    info: from_pretrained's loading info. has_kv_scales: whether scales of a KV cache may be there.
    """
    # transformers fills in random numbers and goes on.
    missing = [k for k in info["missing_keys"] if not any(u in k.split(".") for u in unused)]
    if missing:
        raise CheckpointError(
            f"expected all of the model's weights, got none for {list_names(sorted(missing))}"
        )
    left = find_scales(info["unexpected_keys"])
    left += [] if has_kv_scales else kv_scale_names(info["unexpected_keys"])
    if left:
        raise CheckpointError(
            "expected weights without scales, as no config says how they are quantized, got "
            f"{list_names(sorted(set(left)))}: add the quantization_config that its writer used "
            "to config.json"
        )

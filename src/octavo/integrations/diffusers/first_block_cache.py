"""diffusers' FirstBlockCache, where it works: the first block runs in each step and decides.

diffusers' hooks fail in the middle of a generation where a model's blocks are not what they expect.
What they expect is checked here beforehand. The rest is theirs, but for a hook on the transformer
that keeps generations apart (denoising.py): diffusers forgets the last one only at its end, so that
one that was interrupted would go on in the next.
"""

import inspect
from typing import Any

from diffusers import FirstBlockCacheConfig, HookRegistry
from torch import nn

from octavo.errors import UnsupportedError
from octavo.integrations.diffusers.block_layouts import BlockLayout, find_layout
from octavo.integrations.diffusers.denoising import STEP_HOOK, Denoising, StepHook
from octavo.internals import internals, require

with internals("diffusers"):
    from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
    from diffusers.hooks._helpers import TransformerBlockRegistry
    from diffusers.hooks.first_block_cache import _FBC_LEADER_BLOCK_HOOK

require("torch.nn.Module._compiled_call_impl")


class FirstBlockStepHook(StepHook):
    """The hook on the transformer."""

    def check_call(self, module: nn.Module) -> None:
        """Raise for compiled blocks: diffusers' hooks would be compiled with them."""
        super().check_call(module)
        check_not_compiled(self.blocks)


def check_not_compiled(blocks: Any) -> None:
    """Raise if one of the blocks is compiled."""
    if any(block._compiled_call_impl is not None for block in blocks):
        raise UnsupportedError(
            "first_block_cache: expected blocks that are not compiled, got compiled ones: use "
            "tea_cache with them"
        )


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that diffusers' FirstBlockCache would take, in its order."""
    return {
        f"{name}.{index}": block
        for name, part in model.named_children()
        if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS and isinstance(part, nn.ModuleList)
        for index, block in enumerate(part)
    }


def check_first_block_cache(model: nn.Module) -> None:
    """Raise if diffusers' FirstBlockCache would fail with a model, or do nothing."""
    reason = _problem(model)
    if reason is not None:
        raise UnsupportedError(
            f"first_block_cache: expected a transformer that diffusers can do it to, got "
            f"{type(model).__name__}: {reason}; use tea_cache"
        )
    check_not_compiled(find_blocks(model).values())


def _problem(model: nn.Module) -> str | None:
    """Why diffusers cannot do it; None if it can."""
    if not hasattr(model, "enable_cache"):
        return "it has no enable_cache"
    blocks = find_blocks(model)
    returns = set()
    for name, block in blocks.items():
        kind = type(block)
        try:
            metadata = TransformerBlockRegistry.get(kind)
        except ValueError:
            return f"its blocks ({kind.__name__}) are not in diffusers' registry"
        has_encoder = metadata.return_encoder_hidden_states_index is not None
        needed = ("hidden_states", "encoder_hidden_states")[: 1 + has_encoder]
        missing = [n for n in needed if n not in inspect.signature(kind.forward).parameters]
        if missing:
            return f"its block {name} ({kind.__name__}) takes no {missing[0]}"
        returns.add(has_encoder)
    if len(returns) > 1:
        return "its first blocks return two tensors and its last ones one"
    if len(blocks) < 2:
        return f"it has {len(blocks)} blocks, and at least two are needed"
    return None


def attach_first_block_cache_(
    component: str, model: Any, denoising: Denoising, *, threshold: float
) -> list[str]:
    """Let diffusers put its hooks on a transformer's blocks; returns the names of the blocks."""
    blocks = find_blocks(model)
    layout = find_layout(model) or BlockLayout(())
    model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    first = next(iter(blocks.values()))
    leader: Any = HookRegistry.check_if_exists_or_initialize(first).get_hook(_FBC_LEADER_BLOCK_HOOK)
    steps = FirstBlockStepHook(
        component,
        denoising,
        leader.state_manager,
        list(blocks.values()),
        layout.time,
        layout.is_rising,
    )
    HookRegistry.check_if_exists_or_initialize(model).register_hook(steps, STEP_HOOK)
    return list(blocks)

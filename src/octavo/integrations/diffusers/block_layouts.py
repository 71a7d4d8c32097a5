"""Where the blocks of diffusion transformers are, and what goes in and out of them: data."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from octavo.errors import UnsupportedError

_HIDDEN, _ENCODER = "hidden_states", "encoder_hidden_states"


@dataclass(frozen=True)
class BlockList:
    """One list of blocks: its name, and what a block returns, by the names of its arguments.

    joined: the arguments of the blocks before that the model joins along the tokens, in this order,
    for the first argument that these return.
    """

    name: str
    returns: tuple[str, ...]
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of one transformer class, in the order in which they run.

    kept: what the model reads after the last block. attention: the module of the first block that
    takes its modulated input, as `attention_argument`. time: the argument of the model that says
    the time; is_rising: it rises from step to step.
    """

    lists: tuple[BlockList, ...]
    kept: tuple[str, ...] = (_HIDDEN,)
    attention: str = "attn"
    attention_argument: str = _HIDDEN
    time: str = "timestep"
    is_rising: bool = False


BY_CLASS: Mapping[str, BlockLayout] = {
    "FluxTransformer2DModel": BlockLayout(
        (
            BlockList("transformer_blocks", (_ENCODER, _HIDDEN)),
            BlockList("single_transformer_blocks", (_ENCODER, _HIDDEN)),
        )
    ),
    "Flux2Transformer2DModel": BlockLayout(
        (
            BlockList("transformer_blocks", (_ENCODER, _HIDDEN)),
            BlockList("single_transformer_blocks", (_HIDDEN,), joined=(_ENCODER, _HIDDEN)),
        )
    ),
    "QwenImageTransformer2DModel": BlockLayout(
        (BlockList("transformer_blocks", (_ENCODER, _HIDDEN)),)
    ),
    "ZImageTransformer2DModel": BlockLayout(
        (BlockList("layers", ("x",)),),
        kept=("x",),
        attention="attention",
        time="t",
        is_rising=True,  # the pipeline gives 1 minus the time
    ),
    "WanTransformer3DModel": BlockLayout((BlockList("blocks", (_HIDDEN,)),), attention="attn1"),
    "HunyuanVideo15Transformer3DModel": BlockLayout(
        (BlockList("transformer_blocks", (_HIDDEN, _ENCODER)),)
    ),
    "Cosmos3OmniTransformer": BlockLayout(
        (BlockList("layers", ("und_seq", "gen_seq")),),
        kept=("und_seq", "gen_seq"),  # text is inside of the transformer
        attention="self_attn",
        attention_argument="gen_seq",
        time="vision_timesteps",
    ),
}


def class_names(model: nn.Module) -> list[str]:
    """The names of a model's class and of those that it extends, by which data is found."""
    return [base.__name__ for base in type(model).__mro__]


def find_layout(model: nn.Module) -> BlockLayout | None:
    """What is known of a model's blocks, by its class or a class that it extends."""
    return next((BY_CLASS[name] for name in class_names(model) if name in BY_CLASS), None)


def layout_of(model: nn.Module) -> BlockLayout:
    """`find_layout`, or an error that says which classes are known."""
    if (layout := find_layout(model)) is None:
        raise UnsupportedError(
            f"tea_cache: expected one of {', '.join(BY_CLASS)}, got {type(model).__name__}, whose "
            "blocks are not known"
        )
    return layout


def blocks_of(model: nn.Module, layout: BlockLayout) -> list[tuple[str, BlockList, nn.Module]]:
    """All blocks in the order in which they run, with their names and their list."""
    found = []
    for part in layout.lists:
        blocks = model.get_submodule(part.name)
        found += [(f"{part.name}.{name}", part, block) for name, block in blocks.named_children()]
    return found


def read_argument(
    module: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """An argument of a module's forward by its name; None if it was not given."""
    if name in kwargs:
        return kwargs[name]
    kind: Any = type(module)
    places = _parameter_places(kind)
    return args[places[name]] if places.get(name, len(args)) < len(args) else None


@cache
def _parameter_places(kind: Any) -> dict[str, int]:
    parameters = list(inspect.signature(kind.forward).parameters)[1:]  # without self
    return {name: place for place, name in enumerate(parameters)}

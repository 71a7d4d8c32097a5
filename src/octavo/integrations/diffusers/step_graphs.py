"""Diffusion transformers that run by CUDA graphs: a step without a launch of each kernel.

A step of FP8 layers is many short kernels, and the host may need longer to launch them than the GPU
to run them. Steps of one generation have the same shapes, so one capture serves them all. As
`use_graphs_` does for vision towers, a forward is put on the instance.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.apply_model import is_diffusers_model
from octavo.integrations.diffusers.denoising import hook_names
from octavo.integrations.diffusers.pipeline import find_transformers
from octavo.integrations.patch import begin_patch, is_patched, undo_patches_
from octavo.internals import internals
from octavo.layers.joint_linear import JointLinear, join_named_

with internals("torch"):
    from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

FEATURE, GRAPHS = "step_graphs", "_octavo_step_graphs"
# Shapes with a graph of their own; of more, that which was not used for longest is given up.
MAX_GRAPHS = 4
NUM_WARM_UPS = 2
# What transformers call projections of the same tokens; in Wan's attn2, q has others than k and v.
JOINT = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))
NOT_JOINT = ("attn2",)
# Tensors of other kinds of arguments keep their place in the graph; values are part of its key.
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)


def use_step_graphs_(model: Any, *, max_graphs: int = MAX_GRAPHS) -> list[str]:
    """Let a pipeline's transformers, or one of them, run by CUDA graphs; returns their names.

    `apply_` and compiling come first. FP8 layers that are given the same tokens become one product
    (`JointLinear`), until the graphs are dropped. The first step of each shape is captured: what
    asks the device for a value cannot be, and raises then. Everything on the host that the forward
    depends on beside its arguments (adapters, hooks) must stay as it is; `drop_step_graphs_` before
    it changes.
    """
    found = find_transformers(model)
    for name, module in found.items():
        if not is_diffusers_model(module):
            raise UnsupportedError(
                f"expected a transformer of diffusers, got {type(module).__name__}"
            )
        if has_step_graphs(module):
            raise ConfigError(f"{name}: expected a transformer without graphs, got one with them")
        if "forward" in vars(module) or hook_names(module):
            raise UnsupportedError(
                f"{name}: expected a forward of its class, got a replaced or hooked one, which may "
                "do another thing in each step: remove step caches and offloading first"
            )
        device = next(module.parameters()).device
        if device.type != "cuda":
            raise UnsupportedError(f"{name}: CUDA graphs need a CUDA GPU, got {device}")
    for module in found.values():
        put_graphs_(module, StepGraphs(module, max_graphs))
    return list(found)


def put_graphs_(module: nn.Module, graphs: "StepGraphs") -> None:
    """Let a transformer replay these graphs of its own."""
    patch = begin_patch(module, FEATURE)
    patch.set(module, GRAPHS, graphs)
    patch.set(module, "forward", partial(StepGraphs.__call__, graphs))
    for joint in graphs.joined:
        patch.hook(_Joined(joint))


def drop_step_graphs_(model: Any) -> list[str]:
    """Undo `use_step_graphs_`; returns the names of the transformers that had graphs."""
    found = {name: m for name, m in find_transformers(model).items() if has_step_graphs(m)}
    if not found:
        raise ConfigError(
            "expected transformers with graphs, got none: use_step_graphs_ makes them"
        )
    for module in found.values():
        undo_patches_(module, FEATURE)
    return list(found)


def has_step_graphs(module: nn.Module) -> bool:
    """Whether a transformer runs by graphs."""
    return is_patched(module, FEATURE)


@dataclass
class _Joined:
    """Layers that were joined into one product, as a patch undoes it."""

    layer: JointLinear

    def remove(self) -> None:
        self.layer.split_()


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    layout: Any  # which of the inputs are inside which lists
    inputs: list[Tensor]
    outputs: Any


class StepGraphs:
    """The graphs of one transformer, by the shapes of its arguments."""

    def __init__(self, module: nn.Module, max_graphs: int = MAX_GRAPHS) -> None:
        if max_graphs < 1:
            raise ConfigError(f"expected max_graphs of 1 or more, got {max_graphs}")
        self.run: Callable[..., Any] = partial(type(module).forward, module)
        self.max_graphs = max_graphs
        self.joined = join_named_(module, JOINT, without=NOT_JOINT)
        self.captured: OrderedDict[Any, _Captured] = OrderedDict()
        self.pool: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepGraphs":
        raise UnsupportedError("expected a model without graphs to copy: drop_step_graphs_ first")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the transformer's own forward returns, in tensors of their own."""
        if torch.is_grad_enabled():
            raise UnsupportedError("expected a step without gradients: use torch.no_grad()")
        leaves, layout = tree_flatten((args, kwargs))
        key = (len(args), *kwargs, *map(_key_of, leaves))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if key not in self.captured or self.captured[key].layout != layout:
            self.captured.pop(key, None)
            while len(self.captured) >= self.max_graphs:
                self.captured.popitem(last=False)
            self.captured[key] = self._capture(leaves, layout)
        self.captured.move_to_end(key)
        found = self.captured[key]
        for own, given in zip(found.inputs, tensors, strict=True):
            own.copy_(given)
        found.graph.replay()
        return tree_map_only(Tensor, torch.clone, found.outputs)

    def _capture(self, leaves: list[Any], layout: Any) -> _Captured:
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(own, layout)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                self.run(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                outputs = self.run(*args, **kwargs)
        except RuntimeError as error:
            raise UnsupportedError(
                "expected a step that waits for nothing, got one that cannot be captured: "
                f"{str(error).splitlines()[0]}; run it without graphs"
            ) from error
        tensors = [leaf for leaf in own if isinstance(leaf, Tensor)]
        return _Captured(graph, layout, tensors, outputs)


def _key_of(leaf: Any) -> Any:
    """What of an argument a graph is made for; raises for one that it cannot hold."""
    if isinstance(leaf, Tensor):
        if not leaf.is_cuda:
            raise UnsupportedError(
                f"expected tensors on the GPU, got one on {leaf.device} of shape "
                f"{list(leaf.shape)}: move it there, or run without graphs"
            )
        return (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride())
    if isinstance(leaf, _VALUES):
        return (type(leaf), leaf)
    raise UnsupportedError(
        f"expected arguments of tensors, numbers and texts, got {type(leaf).__name__}: run "
        "without graphs"
    )

"""Whole vision towers as CUDA graphs, one for each token budget.

The patches of a request are padded to the next budget. Padding is in no sequence: cu_seqlens end
with the last image, and the entries that are left name empty sequences. Only amax could see it, as
biases make zeros others: layers with dynamic scales look no further than the last of cu_seqlens,
which lies on the device, where a replay finds its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.autosave import not_counted, savers_of
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.patch import begin_patch, find_patched, undo_patches_
from octavo.integrations.transformers.fused_vision import FAMILIES
from octavo.internals import internals
from octavo.layers.encoder_attention import EncoderAttention
from octavo.layers.scaling import DynamicScaling
from octavo.ops.explain import explain_op

SUPPORTED = tuple(sorted(one.tower for one in FAMILIES.values() if one.has_graphs))
# Whatever is compiled, planned or allocated on a first call is there before the capture.
NUM_WARMUPS = 2
# Where a tower that runs by graphs has them, among its attributes; see graphed_forward.
GRAPHS = "octavo_graphs"
FEATURE = "vision_graphs"


@dataclass(frozen=True)
class Plan:
    """How a request will run: padded to `budget` tokens, or, where it is None, eagerly; and why."""

    budget: int | None
    reason: str


@dataclass(frozen=True)
class _Captured:
    graph: Any
    inputs: Mapping[str, Tensor]
    result: Any


def powers_of_two(largest: int, smallest: int = 256) -> tuple[int, ...]:
    """Budgets that double from `smallest` to the first that holds `largest` tokens."""
    if not 1 <= smallest <= largest:
        raise ConfigError(f"expected 1 ≤ smallest ≤ largest, got {smallest} and {largest}")
    budgets = [smallest]
    while budgets[-1] < largest:
        budgets.append(2 * budgets[-1])
    return tuple(budgets)


class VisionGraphs:
    """Calls a vision tower by CUDA graphs: captured at the first request of each budget.

    budgets: tokens before merging, which requests are padded to. max_sequences: of images and
    frames in a request. Requests that do not fit run eagerly, and `plan` says why. Replays count
    for dynamic scales and for savers of scales; warm-up and capture do not. If the tower is moved
    or its attention changed, graphs are captured anew.
    """

    def __init__(self, tower: Any, budgets: Sequence[int], *, max_sequences: int = 8) -> None:
        if type(tower).__name__ not in SUPPORTED:
            raise UnsupportedError(
                f"expected a vision tower, one of {', '.join(SUPPORTED)}; got "
                f"{type(tower).__name__}"
            )
        self.unit = int(tower.config.spatial_merge_size) ** 2
        wrong = [b for b in budgets if b < 1 or b % self.unit]
        if wrong or not budgets:
            raise ConfigError(
                f"expected budgets that are multiples of {self.unit} tokens, got {wrong or 'none'}"
            )
        if max_sequences < 1:
            raise ConfigError(f"expected max_sequences of at least 1, got {max_sequences}")
        self.tower, self.max_sequences = tower, max_sequences
        self.budgets = tuple(sorted(set(budgets)))
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None
        self._fingerprint: tuple[object, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: graphs read the memory of this tower, not of another."""
        return {**vars(self), "_captured": {}, "_pool": None, "_fingerprint": ()}

    def plan(self, grid_thw: Tensor) -> Plan:
        """How a request with this grid will run on this machine."""
        plan = self._padding_plan(grid_thw)
        if plan.budget is not None and (objection := self.objection()):
            return Plan(None, objection)
        return plan

    def objection(self) -> str:
        """Why the tower, as it is, can run by no graph at all; empty if it can."""
        device = next(self.tower.parameters()).device
        if device.type != "cuda":
            return f"CUDA graphs need a CUDA GPU, got a tower on {device}"
        if objection := self._objection_to_attention():
            return objection
        layers = (m for m in self.tower.modules() if isinstance(m, EncoderAttention))
        for head_dim in {layer.head_dim for layer in layers if layer.scaling is not None}:
            found = explain_op("quantize_qkv", "BF16 to FP8", device, head_dim).selection
            if found is not None and found.impl == "reference":
                why = "; ".join(found.objections.values())
                return f"the reference quantizes, which waits for the device: {why}"
        return ""

    def _objection_to_attention(self) -> str:
        implementation = self.tower.config._attn_implementation
        if "flash" in implementation:
            return ""
        return f"attention {implementation!r} asks the device for lengths: apply_ a recipe"

    def _padding_plan(self, grid_thw: Tensor) -> Plan:
        if objection := self._objection_to_attention():
            return Plan(None, objection)
        ends = _cu_seqlens(grid_thw)
        num_tokens, num_sequences = ends[-1], len(ends) - 1
        if num_tokens == 0:
            return Plan(None, "the request has no tokens")
        if num_sequences > self.max_sequences:
            limit = f"max_sequences {self.max_sequences}"
            return Plan(None, f"{num_sequences} sequences are more than {limit}")
        fitting = next((budget for budget in self.budgets if num_tokens <= budget), None)
        if fitting is None:
            largest = f"the largest budget, {self.budgets[-1]}"
            return Plan(None, f"{num_tokens} tokens are more than {largest}")
        return Plan(fitting, f"{num_tokens} tokens fit the budget of {fitting}")

    @torch.no_grad()
    def __call__(
        self, hidden_states: Tensor, grid_thw: Tensor, *, is_required: bool = False
    ) -> Any:
        """The tower's result for the packed patches of some images, in memory of its own.

        is_required: raise UnsupportedError rather than run eagerly.
        """
        plan = self.plan(grid_thw)
        if plan.budget is None:
            if is_required:
                raise UnsupportedError(f"expected a request for a CUDA graph, but {plan.reason}")
            return self.tower(hidden_states=hidden_states, grid_thw=grid_thw)
        result = self.replay(hidden_states, grid_thw, plan.budget)
        for saver in savers_of(self.tower):  # a replay calls no hooks
            saver.step()
        return result

    # Memory of a graph outlives the mode of its first call: made in inference mode, nobody could
    # write to it outside.
    @torch.inference_mode(False)
    @torch.no_grad()
    def replay(self, hidden_states: Tensor, grid_thw: Tensor, budget: int) -> Any:
        """The result by the graph of a budget, captured if it is not yet; no saver is told."""
        inputs = self._padded(hidden_states, grid_thw, budget)
        self._forget_if_changed()
        if budget not in self._captured:
            self._captured[budget] = self._capture(inputs, budget)
        captured = self._captured[budget]
        for name, static in captured.inputs.items():
            static.copy_(inputs[name])
        captured.graph.replay()
        return self._cut(captured.result, len(hidden_states), budget, is_copied=True)

    @torch.no_grad()
    def run_padded(self, hidden_states: Tensor, grid_thw: Tensor) -> Any:
        """What the graph of a request's budget computes, without a graph: on any device."""
        plan = self._padding_plan(grid_thw)
        if plan.budget is None:
            raise UnsupportedError(f"expected a request that fits a budget, but {plan.reason}")
        inputs = self._padded(hidden_states, grid_thw, plan.budget)
        result = self._forward(inputs, plan.budget)
        return self._cut(result, len(hidden_states), plan.budget, is_copied=False)

    def _num_rows(self, budget: int) -> int:
        # Room for one token after merging more: there is always a row of padding to overwrite.
        return budget + self.unit

    def _padded(self, hidden_states: Tensor, grid_thw: Tensor, budget: int) -> dict[str, Tensor]:
        """A request's patches, tables of positions and lengths in the shapes of a budget."""
        ends = _cu_seqlens(grid_thw)
        num_tokens = ends[-1]
        if hidden_states.dim() != 2 or len(hidden_states) != num_tokens:
            raise ConfigError(
                f"expected {num_tokens} rows of patches, got {list(hidden_states.shape)}"
            )
        device, num_rows = hidden_states.device, self._num_rows(budget)
        tables = self._tables(grid_thw.to(device))
        padding = num_rows - num_tokens
        padded = {
            name: nn.functional.pad(table, (0, 0, 0, padding))
            for name, table in {"hidden_states": hidden_states, **tables}.items()
        }
        ends += [num_tokens] * (self.max_sequences + 1 - len(ends))
        padded["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
        return padded

    def _tables(self, grid_thw: Tensor) -> dict[str, Tensor]:
        """What the tower would make of the grid itself, by waiting for the device."""
        with internals("transformers"):
            from transformers.vision_utils import (
                get_vision_interpolation_indices_and_weights,
                get_vision_position_ids,
            )

        tower = self.tower
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.config.spatial_merge_size,
        )
        positions = get_vision_position_ids(grid_thw, tower.spatial_merge_size)
        return {"interp_indices": indices, "interp_weights": weights, "position_ids": positions}

    def _forward(self, inputs: Mapping[str, Tensor], budget: int) -> Any:
        """The tower's pass over padded inputs; nothing in it waits for the device."""
        # With all tables given, the tower does not look at the grid.
        grid = torch.zeros(0, 3, dtype=torch.int64)
        tower = self.tower
        # A forward of graphs on the tower would come back to here.
        call = partial(type(tower).forward, tower) if GRAPHS in vars(tower) else tower
        return call(**inputs, grid_thw=grid, max_seqlen=budget, return_dict=True)

    def _capture(self, inputs: Mapping[str, Tensor], budget: int) -> _Captured:
        static = {name: x.clone() for name, x in inputs.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with history_kept(self.tower), not_counted(self.tower):
            with torch.cuda.stream(stream):
                for _ in range(NUM_WARMUPS):
                    self._forward(static, budget)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = self._forward(static, budget)
        return _Captured(graph, static, result)

    def _forget_if_changed(self) -> None:
        """Drop graphs that read memory which is no longer the tower's."""
        found = _fingerprint(self.tower)
        if found != self._fingerprint:
            self._captured.clear()
            # Graphs share memory: none is replayed before the last one's result is copied.
            self._pool = torch.cuda.graph_pool_handle()
            self._fingerprint = found

    def _cut(self, result: Any, num_tokens: int, budget: int, *, is_copied: bool) -> Any:
        """A padded result without its padding."""
        num_rows = self._num_rows(budget)
        kept = {num_rows: num_tokens, num_rows // self.unit: num_tokens // self.unit}

        def cut(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x[: kept[len(x)]].clone() if is_copied else x[: kept[len(x)]]
            if isinstance(x, list | tuple):
                return type(x)(cut(part) for part in x)
            return x

        return type(result)(**{name: cut(x) for name, x in result.items()})


def _fingerprint(tower: Any) -> tuple[object, ...]:
    """What a graph of the tower depends on; equal as long as its graphs are good.

    It holds the layers themselves, so that no new one can lie where an old one lay.
    """
    first = next(tower.parameters())
    state = (x for block in tower.blocks for x in block.attn.buffers())
    pointers = (x.data_ptr() for x in chain([first], state))
    layers = [m for m in tower.modules() if isinstance(m, EncoderAttention)]
    impls = (layer.impl for layer in layers)
    return (tower.config._attn_implementation, *layers, *impls, *pointers)


def _cu_seqlens(grid_thw: Tensor) -> list[int]:
    """Where each image, or frame of a video, begins, and where the last one ends."""
    if grid_thw.dim() != 2 or grid_thw.shape[1] != 3:
        raise ConfigError(f"expected grid_thw [images, 3], got {list(grid_thw.shape)}")
    ends = [0]
    for num_frames, rows, columns in grid_thw.tolist():
        for _ in range(int(num_frames)):
            ends.append(ends[-1] + int(rows) * int(columns))
    return ends


@contextmanager
def history_kept(tower: nn.Module) -> Iterator[None]:
    """What runs inside leaves the histories of dynamic scales as they were."""
    layers = [m for m in tower.modules() if isinstance(m, EncoderAttention)]
    dynamic = [layer for layer in layers if isinstance(layer.scaling, DynamicScaling)]
    buffers = [x for layer in dynamic for x in layer.buffers()]
    before = [x.clone() for x in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def use_graphs_(model: nn.Module, budgets: Sequence[int], *, max_sequences: int = 8) -> list[str]:
    """Let a model's vision tower run by CUDA graphs, in place; returns the names of its towers.

    budgets, max_sequences: as of VisionGraphs. `apply_` comes first: attention must not ask the
    device for lengths. Copies of the model, pickled ones too, capture graphs of their own.
    """
    if find_patched(model, FEATURE):
        raise ConfigError("expected a model without graphs, got one that has them: drop_graphs_")
    towers = {n: m for n, m in model.named_modules() if type(m).__name__ in SUPPORTED}
    if not towers:
        raise UnsupportedError(
            f"expected a model with a vision tower, one of {', '.join(SUPPORTED)}; got "
            f"{type(model).__name__} with none"
        )
    made = {}
    for name, tower in towers.items():
        if "forward" in vars(tower):
            raise UnsupportedError(
                f"{name or type(tower).__name__}: expected the forward of its class, got another: "
                "use graphs before what replaces it"
            )
        made[name] = VisionGraphs(tower, budgets, max_sequences=max_sequences)
        if objection := made[name].objection():
            raise UnsupportedError(objection)
    for name, graphs in made.items():
        patch = begin_patch(towers[name], FEATURE)
        patch.set(towers[name], GRAPHS, graphs)
        # A partial, not a method: those lose themselves when a module is pickled.
        patch.set(towers[name], "forward", partial(graphed_forward, graphs))
    return list(made)


def drop_graphs_(model: nn.Module) -> list[str]:
    """Undo `use_graphs_`: free the graphs; returns the names of the towers that had them."""
    if not find_patched(model, FEATURE):
        raise ConfigError("expected a model that use_graphs_ has changed, got one without graphs")
    return undo_patches_(model, FEATURE)


def graphed_forward(
    graphs: VisionGraphs, hidden_states: Tensor, grid_thw: Tensor, **options: Any
) -> Any:
    """The forward of a tower by the graph of a request's budget, or by its class's if none fits."""
    tower = graphs.tower
    if tower.training or (torch.is_grad_enabled() and hidden_states.requires_grad):
        raise UnsupportedError(
            "CUDA graphs are for inference: expected a model in evaluation mode and pixels without "
            "gradients, got others: model.eval(), or drop_graphs_(model)"
        )
    if objection := graphs.objection():
        raise UnsupportedError(f"{objection}; or drop_graphs_(model)")
    plan = graphs.plan(grid_thw)
    if plan.budget is None:
        return type(tower).forward(tower, hidden_states, grid_thw, **options)
    default = getattr(tower.config, "return_dict", True)
    is_tuple = options.pop("return_dict", default) is False
    options.pop("use_cache", None)  # `generate` tells every part of a model; a tower has none
    # None and False are what a graph does anyway; whatever else is asked for, it cannot know.
    if given := sorted(n for n, x in options.items() if x is not None and x is not False):
        raise UnsupportedError(
            "expected hidden_states, grid_thw and return_dict for a tower with CUDA graphs, got "
            f"{', '.join(given)}: drop_graphs_(model)"
        )
    result = graphs.replay(hidden_states, grid_thw, plan.budget)
    for saver in savers_of(tower):
        if not saver.is_watching(tower):  # who watches the tower sees this very call
            saver.step()
    return result.to_tuple() if is_tuple else result

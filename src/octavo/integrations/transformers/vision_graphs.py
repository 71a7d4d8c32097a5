"""Whole vision towers as CUDA graphs, one for each token budget.

A graph has one shape, requests have many: the patches of a request are padded to the next budget.
Padding is in no sequence: cu_seqlens end with the last image, and the entries that are left name
empty sequences. So no image sees it, whatever it holds, and what a tower makes of it is cut off.

Only amax could still see it: through biases even zeros become queries, keys and values that are not
zero. Layers with dynamic scales therefore look no further than the last of cu_seqlens, which lies
on the device: a replay is told by writing to it.
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
from octavo.internals import internals
from octavo.layers.encoder_attention import EncoderAttention
from octavo.layers.scaling import DynamicScaling
from octavo.ops.explain import explain_op

# Towers whose tables of positions can be made outside of their forward pass.
SUPPORTED = (
    "Qwen3VLMoeVisionModel",
    "Qwen3VLVisionModel",
    "Qwen3_5MoeVisionModel",
    "Qwen3_5VisionModel",
)
# Whatever is compiled, planned or allocated on a first call is there before the capture.
NUM_WARMUPS = 2
# Where a tower that runs by graphs has them, among its attributes; see graphed_vision.
GRAPHS = "octavo_graphs"


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

    budgets: tokens before merging, which requests are padded to. max_sequences: how many images and
    frames of videos a request may have. Requests that fit no budget run eagerly, and `plan` says
    why. Dynamic scales go on counting in replays, and so do savers of scales that watch the tower
    (octavo.calibration.autosave); warm-up and capture leave no trace in them. If the tower is moved
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
                f"expected budgets that are multiples of {self.unit} tokens, which the tower "
                f"merges into one; got {wrong or 'none'}"
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
        return self._objection_to_attention() or self._objection_to_quantization(device)

    def _objection_to_attention(self) -> str:
        implementation = self.tower.config._attn_implementation
        if "flash" in implementation:
            return ""
        return f"attention {implementation!r} asks the device for lengths: apply_ a recipe"

    def _objection_to_quantization(self, device: torch.device) -> str:
        layers = (m for m in self.tower.modules() if isinstance(m, EncoderAttention))
        for head_dim in {layer.head_dim for layer in layers if layer.scaling is not None}:
            found = explain_op("quantize_qkv", "BF16 to FP8", device, head_dim).selection
            if found is not None and found.impl == "reference":
                why = "; ".join(found.objections.values())
                return f"the reference quantizes, which waits for the device: {why}"
        return ""

    def _padding_plan(self, grid_thw: Tensor) -> Plan:
        if objection := self._objection_to_attention():
            return Plan(None, objection)
        num_tokens, num_sequences = _count(grid_thw)
        if num_tokens == 0:
            return Plan(None, "the request has no tokens")
        if num_sequences > self.max_sequences:
            return Plan(
                None, f"{num_sequences} sequences are more than max_sequences {self.max_sequences}"
            )
        for budget in self.budgets:
            if num_tokens <= budget:
                return Plan(budget, f"{num_tokens} tokens fit the budget of {budget}")
        return Plan(
            None, f"{num_tokens} tokens are more than the largest budget, {self.budgets[-1]}"
        )

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
        num_tokens, _ = _count(grid_thw)
        if hidden_states.dim() != 2 or len(hidden_states) != num_tokens:
            raise ConfigError(
                f"expected {num_tokens} rows of patches, as grid_thw says, got "
                f"{list(hidden_states.shape)}"
            )
        device, num_rows = hidden_states.device, self._num_rows(budget)
        tables = self._tables(grid_thw.to(device))
        padding = num_rows - num_tokens
        padded = {
            name: nn.functional.pad(table, (0, 0, 0, padding))
            for name, table in {"hidden_states": hidden_states, **tables}.items()
        }
        ends = _cu_seqlens(grid_thw)
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

    The layers themselves are in it, and compare by identity: new ones may lie where old ones lay,
    once those are gone, and while they are held here they are not.
    """
    first = next(tower.parameters())
    state = (x for block in tower.blocks for x in block.attn.buffers())
    pointers = (x.data_ptr() for x in chain([first], state))
    layers = [m for m in tower.modules() if isinstance(m, EncoderAttention)]
    impls = (layer.impl for layer in layers)
    return (tower.config._attn_implementation, *layers, *impls, *pointers)


def _count(grid_thw: Tensor) -> tuple[int, int]:
    """(tokens, sequences) of a grid."""
    grids = _grids(grid_thw)
    return sum(t * h * w for t, h, w in grids), sum(t for t, _, _ in grids)


def _cu_seqlens(grid_thw: Tensor) -> list[int]:
    """Where each image, or frame of a video, begins, and where the last one ends."""
    ends = [0]
    for t, h, w in _grids(grid_thw):
        ends += [ends[-1] + (i + 1) * h * w for i in range(t)]
    return ends


def _grids(grid_thw: Tensor) -> list[tuple[int, int, int]]:
    if grid_thw.dim() != 2 or grid_thw.shape[1] != 3:
        raise ConfigError(f"expected grid_thw [images, 3], got {list(grid_thw.shape)}")
    return [(int(t), int(h), int(w)) for t, h, w in grid_thw.tolist()]


def _dynamic_layers(tower: nn.Module) -> list[EncoderAttention]:
    layers = [m for m in tower.modules() if isinstance(m, EncoderAttention)]
    return [layer for layer in layers if isinstance(layer.scaling, DynamicScaling)]


@contextmanager
def history_kept(tower: nn.Module) -> Iterator[None]:
    """What runs inside leaves the histories of dynamic scales as they were."""
    buffers = [x for layer in _dynamic_layers(tower) for x in layer.buffers()]
    before = [x.clone() for x in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

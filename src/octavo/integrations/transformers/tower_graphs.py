"""Vision towers as CUDA graphs without being asked: one for each shape of a request, seen twice.

Requests with as many tokens, as many sequences and as long a longest one share a graph: where
images lie in them is an input. Nothing is padded, so results and histories are those of eager
calls.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.autosave import not_counted
from octavo.integrations.patch import begin_patch, find_patched, undo_patches_
from octavo.integrations.transformers.graph_capture import (
    DEVICES,
    NotCapturedError,
    allows_replay,
    memory_of,
    record,
    try_step,
)
from octavo.integrations.transformers.graph_state import Snapshot, find_objection
from octavo.integrations.transformers.vision_graphs import (
    AUTOMATIC,
    SUPPORTED,
    VisionGraphs,
    cu_seqlens_of,
    history_kept,
)

# Requests of more tokens keep a GPU busy without graphs, and their memory would stay.
MAX_TOKENS = 32768
# Graphs of a tower, which share their memory; shapes that were seen once.
MAX_GRAPHS, MAX_SEEN = 8, 64
# Memory of intermediate results stays with the graphs: so large a part of the device must be free.
FREE_FRACTION = 8
# What a capture takes: a pass to try and one to record (H200: 0.5 ms a layer each), and torch's own
# cleaning up.
SECONDS_PER_LAYER, SECONDS = 0.001, 0.2

# Tokens, sequences, the longest one, and the dtype of patches.
Shape = tuple[int, int, int, torch.dtype]
_Captured = tuple[Callable[[], Any], dict[str, Tensor], Any]


class TowerGraphs:
    """The graphs of a tower's calls. num_replays: so far. Copies of the tower capture their own."""

    def __init__(self, tower: Any) -> None:
        self.tower = tower
        self.num_replays = 0
        self._captured: OrderedDict[Shape, _Captured] = OrderedDict()
        self._seen: OrderedDict[Shape, None] = OrderedDict()
        self._snapshot: Snapshot | None = None
        self._pool: Any = None
        self._told: set[str] = set()

    @cached_property
    def _budgets(self) -> VisionGraphs:
        """What has the tables and the pass of any graph; a copy's tower has its config later."""
        return VisionGraphs(self.tower, [int(self.tower.config.spatial_merge_size) ** 2])

    def __getstate__(self) -> dict[str, Any]:
        return {"tower": self.tower}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def run(self, hidden_states: Tensor, grid_thw: Tensor, options: dict[str, Any]) -> Any:
        """The result of a call by a graph; None if it has to run eagerly."""
        device, given = hidden_states.device, dict(options)
        given.pop("use_cache", None)  # `generate` tells every part of a model; a tower has none
        is_tuple = (
            given.pop("return_dict", getattr(self.tower.config, "return_dict", True)) is False
        )
        asks_more = any(x is not None and x is not False for x in given.values())
        if is_tuple or asks_more or device.type not in DEVICES or not allows_replay(DEVICES):
            return None
        if self.tower.training or hidden_states.dim() != 2 or len(hidden_states) > MAX_TOKENS:
            return None
        ends = cu_seqlens_of(grid_thw)
        num_tokens = len(hidden_states)
        if num_tokens == 0 or ends[-1] != num_tokens or not self._is_in_order(device):
            return None
        longest = max(stop - start for start, stop in zip(ends, ends[1:], strict=False))
        shape = (num_tokens, len(ends) - 1, longest, hidden_states.dtype)
        if shape not in self._captured and shape not in self._seen:
            self._seen[shape] = None
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
            return None
        return self._replay(shape, hidden_states, grid_thw, ends)

    def _is_in_order(self, device: torch.device) -> bool:
        """Whether a graph may be replayed now; graphs that are out of date are forgotten."""
        if self._snapshot is not None and self._snapshot.holds():
            return True
        self._captured.clear()
        self._seen.clear()
        self._snapshot, self._pool = None, None
        objection = self._budgets.objection() or find_objection(self.tower, device)
        if objection:
            self._tell(objection)
            return False
        self._snapshot = Snapshot(self.tower)
        return True

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(
                f"the vision tower runs without CUDA graphs: {reason}. apply_(…, "
                "cuda_graphs=False) asks for none",
                stacklevel=2,
            )

    # Memory of a graph outlives the mode of its first call: made in inference mode, nobody could
    # write to it outside.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _replay(
        self, shape: Shape, hidden_states: Tensor, grid_thw: Tensor, ends: list[int]
    ) -> Any:
        device = hidden_states.device
        inputs = {"hidden_states": hidden_states, **self._budgets.tables(grid_thw.to(device))}
        inputs["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
        if shape not in self._captured:
            try:
                self._capture(shape, inputs)
            except NotCapturedError as reason:
                self._tell(str(reason))
                self._seen.pop(shape, None)
                return None
        self._captured.move_to_end(shape)
        replay, static, result = self._captured[shape]
        for name, x in static.items():
            x.copy_(inputs[name])
        replay()
        self.num_replays += 1
        return type(result)(**{name: _copied(x) for name, x in result.items()})

    def _capture(self, shape: Shape, inputs: dict[str, Tensor]) -> None:
        device, longest = inputs["hidden_states"].device, shape[2]
        while len(self._captured) >= MAX_GRAPHS:
            self._captured.popitem(last=False)
        if not self._captured:
            self._pool = None  # torch takes no pool whose graphs are all gone
        free, total = memory_of(device)
        if free < total // FREE_FRACTION:
            raise NotCapturedError("too little memory is free for what graphs keep")
        static = {name: x.clone() for name, x in inputs.items()}
        step = partial(self._budgets.forward, static, longest)
        with history_kept(self.tower), not_counted(self.tower):
            try_step(step, device)
        with history_kept(self.tower), not_counted(self.tower):
            replay, result, self._pool = record(step, device, self._pool)
        self._captured[shape] = replay, static, result


def _copied(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    return type(x)(_copied(part) for part in x) if isinstance(x, list | tuple) else x


def attach(model: nn.Module) -> str:
    """Let a model's vision towers replay their calls; returns what to expect, in words.

    Nothing is said of a model that is not on a GPU, or whose towers have no graphs.
    """
    told = []
    for name, tower in model.named_modules():
        if type(tower).__name__ not in SUPPORTED:
            continue
        device = next(tower.parameters()).device
        objection = find_objection(tower, device)
        if "forward" not in vars(tower):
            patch = begin_patch(tower, AUTOMATIC, is_listed=False)
            # A partial, not a method: those lose themselves when a module is pickled.
            patch.set(tower, "forward", partial(shaped_forward, TowerGraphs(tower)))
        if device.type not in DEVICES:
            continue
        if objection:
            told.append(f"{name or 'the tower'} runs without CUDA graphs: {objection}")
            continue
        seconds = SECONDS + SECONDS_PER_LAYER * len(tower.blocks)
        told.append(
            "requests of a shape that was seen before replay CUDA graphs: to capture one takes "
            f"about {seconds:.1f} s, once"
        )
    return "; ".join(told)


def detach(model: nn.Module) -> bool:
    """Undo `attach`, and free the graphs; returns whether there was something to undo."""
    had_graphs = bool(find_patched(model, AUTOMATIC))
    undo_patches_(model, AUTOMATIC)
    return had_graphs


def shaped_forward(
    graphs: TowerGraphs, hidden_states: Tensor, grid_thw: Tensor, **options: Any
) -> Any:
    """The forward of a tower: by the graph of a request's shape, or by its class's."""
    if not torch.compiler.is_compiling():
        found = graphs.run(hidden_states, grid_thw, options)
        if found is not None:
            return found
    return type(graphs.tower).forward(graphs.tower, hidden_states, grid_thw, **options)

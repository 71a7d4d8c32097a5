"""Decode steps of a transformers model over an FP8 cache, as CUDA graphs, without being asked.

`generate()` calls a decoder with one new token for each sequence, again and again. The decoder's
forward is replaced by one that replays such a step from a graph: the second step of its kind over a
cache is captured, after the first has run eagerly and compiled what it needs. What the graph reads
lies in a room (`cache_rooms`), which later caches take over. All other calls run as they did.
"""

import warnings
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.integrations.patch import begin_patch
from octavo.integrations.transformers import kv_cache, text
from octavo.integrations.transformers.cache_rooms import (
    GRAPHS,
    KEPT_FRACTION,
    Captured,
    Room,
    Rooms,
    lasting_memory,
    roomy,
)
from octavo.integrations.transformers.fused_decoder import PASS
from octavo.integrations.transformers.graph_capture import (
    DEVICES,
    NotCapturedError,
    allows_replay,
    memory_of,
    record,
    try_step,
)
from octavo.integrations.transformers.graph_state import Snapshot, find_objection
from octavo.integrations.transformers.paged_cache import PagedLayer
from octavo.integrations.transformers.paged_steps import Pass
from octavo.internals import require
from octavo.layers.saturation import WATCH

require("transformers.PreTrainedConfig._experts_implementation")

# Inputs of a step that its graph has copies of.
INPUTS = ("input_ids", "inputs_embeds", "position_ids")
MASK = "attention_mask"
_NAMED = {*INPUTS, MASK, "past_key_values", "use_cache", PASS}
# Asked for by name or in the config, these are in no graph.
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
# What a capture takes: a pass to try and one to record, launched kernel by kernel (H200: 2 ms a
# layer each), and torch's own cleaning up.
SECONDS_PER_LAYER, SECONDS = 0.004, 0.2


class DecodeGraphs:
    """The graphs of a decoder's steps.

    num_captures, num_replays: so far. Copies of the decoder capture their own.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder: Any = decoder
        self.rooms = Rooms()
        self.num_captures = self.num_replays = 0
        self._snapshot: Snapshot | None = None
        self._failure = ""
        self._told: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"decoder": self.decoder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def run(self, call: dict[str, Any]) -> Any:
        """The result of a call by a graph; None if it has to run eagerly."""
        run: Pass | None = call.get(PASS)
        if run is None or run.cache is None or not _is_plain(call):
            return None
        inputs = _find_inputs(call)
        if inputs is None or not self._is_in_order(run, next(iter(inputs.values())).device):
            return None
        sequences: Any = run.sequences
        implementation = getattr(self.decoder.config, "_experts_implementation", None)
        shapes = ((name, x.shape, x.dtype) for name, x in inputs.items())
        kind = (call.get("use_cache"), implementation, *shapes)
        if sequences.room is not None and not _has_place(run):
            sequences.leave()
        room: Room | None = sequences.room
        captured = None if room is None else room.graphs.get(kind)
        if captured is None:
            if kind not in sequences.seen:
                sequences.seen.add(kind)
                return None
            captured = self._captured(run, kind, inputs, call.get("use_cache"))
            if captured is None:
                return None
        sequences.seen.add(kind)
        return self._replay(captured, inputs, run)

    def _is_in_order(self, run: Pass, device: torch.device) -> bool:
        """Whether a graph may be replayed now; graphs that are out of date are forgotten."""
        if device.type not in DEVICES or self.decoder.training:
            return False
        if getattr(run.sequences, "rooms", None) is not self.rooms:  # as that of a static cache
            return False
        if not all(isinstance(one, PagedLayer) and one.num_seen for one in run.layers):
            return False
        config = self.decoder.config
        if any(getattr(config, name, False) for name in _OUTPUTS) or not config.return_dict:
            return False
        if self._snapshot is None or not self._snapshot.holds():
            self.rooms.forget_graphs()
            self._snapshot, self._failure = None, ""
            if objection := find_objection(self.decoder, device):
                self._tell(objection)
                return False
            self._snapshot = Snapshot(self.decoder)
        return not self._failure

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(
                f"decode steps run without CUDA graphs: {reason}. apply_(…, cuda_graphs=False) "
                "asks for none",
                stacklevel=2,
            )

    def _captured(
        self, run: Pass, kind: Hashable, inputs: dict[str, Tensor], use_cache: bool | None
    ) -> Captured | None:
        """The graph of a step, captured now; None if that cannot be, and why is told."""
        sequences: Any = run.sequences
        try:
            if sequences.room is None:
                self._make_room(run)
            with lasting_memory():
                captured = self._capture(run, sequences.room, inputs, use_cache)
        except NotCapturedError as reason:
            sequences.leave()
            self._tell(str(reason))
            self._failure = "" if reason.may_pass else str(reason)
            return None
        sequences.room.graphs[kind] = captured
        self.num_captures += 1
        return captured

    def _make_room(self, run: Pass) -> None:
        """Make a room of the cache's pages, with place for more tokens."""
        sequences: Any = run.sequences
        lengths: Tensor = sequences.lengths
        capacity = roomy(max(layer.num_seen for layer in run.layers))
        full = [layer for layer in run.layers if layer.window is None]
        more = sum((capacity / layer.capacity - 1) * layer.nbytes for layer in full)
        largest = max(layer.nbytes for layer in run.layers)
        free, total = memory_of(lengths.device)
        if not self.rooms.has_place():
            raise NotCapturedError("too many caches have graphs already", may_pass=True)
        if more + 2 * largest > free:
            raise NotCapturedError("no memory is free for pages that stay", may_pass=True)
        pages = {layer.index: layer.make_lasting(capacity) for layer in run.layers}
        with lasting_memory():
            for name in ("lengths", "num_columns"):
                x: Tensor = getattr(sequences, name)
                setattr(sequences, name, x.clone() if x.is_inference() else x)
        sequences.room = Room(
            len(lengths),
            sequences.lengths,
            sequences.num_columns,
            pages,
            weakref.ref(sequences),
            frozenset(layer.index for layer in full),
        )
        self.rooms.add(sequences.room, total // KEPT_FRACTION)

    def _capture(
        self, run: Pass, room: Room, inputs: dict[str, Tensor], use_cache: bool | None
    ) -> Captured:
        static = {name: x.clone() for name, x in inputs.items()}

        def step() -> Any:
            # A pass of its own: it is known by what its layers share, which the graph makes anew.
            own = Pass(run.layers, run.sequences, run.cache)
            call = {"past_key_values": run.cache, "use_cache": use_cache, PASS: own}
            return type(self.decoder).forward(self.decoder, **static, **call)

        device = run.sequences.lengths.device  # type: ignore[union-attr]
        with _as_before(run):
            try_step(step, device)
        with _as_before(run):
            replay, result, room.pool = record(step, device, room.pool)
        fields = {name for name, x in result.items() if x is not None}
        if more := sorted(fields - {"last_hidden_state", "past_key_values"}):
            raise NotCapturedError(f"{type(self.decoder).__name__} returns {', '.join(more)}, too")
        hidden, kind = result.last_hidden_state, type(result)
        return Captured(replay, static, hidden, kind, "past_key_values" in fields)

    def _replay(self, captured: Captured, inputs: dict[str, Tensor], run: Pass) -> Any:
        with lasting_memory():
            for name, static in captured.inputs.items():
                static.copy_(inputs[name])
            captured.replay()
            hidden = captured.hidden.clone()
        for layer in run.layers:
            layer.num_seen += 1
        self.num_replays += 1
        cache = run.cache if captured.has_cache else None
        return captured.kind(last_hidden_state=hidden, past_key_values=cache)


def _is_plain(call: dict[str, Any]) -> bool:
    """Whether nothing is asked for that a graph does not do."""
    if not call.get("return_dict", True) or not allows_replay(DEVICES):
        return False
    others = (x for name, x in call.items() if name not in _NAMED and name != "return_dict")
    return all(x is None or x is False for x in others)


def _find_inputs(call: dict[str, Any]) -> dict[str, Tensor] | None:
    """The tensors of a step with one token for each sequence, by name; None if it is another."""
    found = {name: x for name in INPUTS if (x := call.get(name)) is not None}
    tokens = found.get("input_ids", found.get("inputs_embeds"))
    # Without positions, the decoder would take those that the host counts.
    if tokens is None or "position_ids" not in found or tokens.shape[1:2] != (1,):
        return None
    mask = call.get(MASK)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        found[MASK] = mask[:, -1:]  # our attention looks at that of new columns alone
    return found


def _has_place(run: Pass) -> bool:
    """Whether one more token fits the pages that are there."""
    return all(one.window is not None or one.num_seen < one.capacity for one in run.layers)


@contextmanager
def _as_before(run: Pass) -> Iterator[None]:
    """What runs inside leaves lengths and counters as they were.

    Keys and values of the new tokens it leaves in their places, where the step will put them again.
    """
    seen = [layer.num_seen for layer in run.layers]
    counting = [one.attention.saturated for one in run.layers if one.attention.counts_saturation]
    lengths: Any = run.sequences.lengths
    tensors = [lengths, *counting]
    before = [x.clone() for x in tensors]
    try:
        with WATCH.paused():
            yield
    finally:
        for layer, num_seen in zip(run.layers, seen, strict=True):
            layer.num_seen = num_seen
        for x, value in zip(tensors, before, strict=True):
            x.copy_(value)


def attach(model: nn.Module) -> str:
    """Let a model with an FP8 cache replay its decode steps; returns what to expect, in words.

    Nothing is said of a model that is not on a GPU, where steps run as they did.
    """
    _, decoder = text.find_decoder(model)
    others = sorted(set(text.find_others(model).values()))
    device = next(decoder.parameters()).device
    if others:
        objection = f"its {', '.join(others)} keep a state of another kind"
    else:
        objection = find_objection(decoder, device)
    if "forward" not in vars(decoder) and not others:
        graphs = DecodeGraphs(decoder)
        patch = begin_patch(decoder, kv_cache.GRAPHS_FEATURE, is_listed=False)
        patch.set(decoder, GRAPHS, graphs)
        # A partial, not a method: those lose themselves when a module is pickled.
        patch.set(decoder, "forward", partial(graphed_forward, graphs))
    if device.type not in DEVICES:
        return ""
    if objection:
        return f"decode steps run without CUDA graphs: {objection}"
    seconds = SECONDS + SECONDS_PER_LAYER * len(text.find_layers(model))
    return (
        "generate() replays CUDA graphs from the second decode step of a batch size on: to capture "
        f"it takes about {seconds:.1f} s, once. What octavo warmup has not compiled, the first "
        "call compiles"
    )


def graphed_forward(graphs: DecodeGraphs, *args: Any, **call: Any) -> Any:
    """The forward of a decoder: a decode step by its graph, everything else by its class."""
    decoder = graphs.decoder
    if not args and not torch.compiler.is_compiling():
        found = graphs.run(call)
        if found is not None:
            return found
    return type(decoder).forward(decoder, *args, **call)

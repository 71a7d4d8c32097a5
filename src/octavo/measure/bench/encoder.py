"""A whole vision tower: stock in BF16, ours in BF16, and in FP8 with dynamic or static scales.

All have the same weights and get the same images. Before anyone is timed, attention of some layers
is compared with stock transformers', on the inputs that those layers have there, and a graph's
result with that of the same tower without one; no check leaves a trace in scales.

Two baselines: the fastest stock tower is what a user has without octavo; ours in BF16, with the
fusions of the FP8 path and the fastest BF16 attention at hand, tells what FP8 itself buys.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.integrations.apply import apply_
from octavo.integrations.transformers.vision import find_layers, scale_name
from octavo.integrations.transformers.vision_graphs import VisionGraphs, history_kept
from octavo.integrations.transformers.vision_tower import (
    Tower,
    make_pixels,
    recorded_calls,
    twin,
    use_attention,
)
from octavo.layers.encoder_attention import EncoderAttention
from octavo.layers.scaling import DynamicScaling
from octavo.measure.bench import peer_impls
from octavo.measure.bench.attention import MAX_ERROR
from octavo.measure.bench.benchmark import Objection, read_rows
from octavo.measure.bench.cases import RESOLUTIONS
from octavo.measure.bench.expect import expect, expect_one_of, expect_within
from octavo.measure.bench.peers import Inputs
from octavo.measure.bench.timing import machine_of, time_alone
from octavo.measure.records import Measurement, Scalar
from octavo.measure.rows import VISION, Row
from octavo.numerics.attention import Packing
from octavo.numerics.error import relative_rms
from octavo.recipe import Bf16Settings, Recipe

FUSED = "fused-bf16"
RECIPES = ("bf16", FUSED, "dynamic", "static")
STOCK = "sdpa"
NUM_SAMPLES = 5
# Relative RMS between a replay and the same tower's eager call of the same images: the same kernels
# with a few rows of padding more.
MAX_GRAPH_ERROR = 0.005

Call = Callable[[], Any]


@dataclass(frozen=True)
class EncoderCase:
    """Some images of one resolution in one request."""

    resolution: str
    num_images: int

    def __post_init__(self) -> None:
        expect_one_of("resolutions", RESOLUTIONS, self.resolution)
        expect(self.num_images >= 1, "at least one image", self.num_images)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each image."""
        return [RESOLUTIONS[self.resolution]] * self.num_images


@dataclass(frozen=True)
class _Entry:
    """A tower that takes part; name: who attends in it; values: of its checks, then its times."""

    name: str
    row: Row
    tower: Any
    is_graph: bool = False
    values: Mapping[str, float] = field(default_factory=dict)
    call: Call = lambda: None

    def __str__(self) -> str:
        return f"{self.name}, {self.row.name} {'by graphs' if self.is_graph else 'eagerly'}"

    @property
    def is_fused(self) -> bool:
        """Whether it is ours in BF16."""
        recipe = None if self.row.needs_scales else self.row.recipe()
        return recipe is not None and isinstance(recipe.vision_attention, Bf16Settings)

    def objection(self, reason: object) -> Objection:
        """Why it cannot run."""
        name = f"{self.name} by graphs" if self.is_graph else self.name
        return Objection("encoder", name, self.row.name, str(reason))


@dataclass(frozen=True)
class _Truth:
    """What stock transformers gives: the tower's result, and some layers' calls."""

    result: Tensor
    layers: Mapping[str, tuple[tuple[Any, ...], dict[str, Any], Tensor]]


def encoder_rows(recipes: Sequence[str]) -> list[Row]:
    """The rows of these recipes; bf16 is the stock tower."""
    return read_rows(recipes, VISION, ("bf16",))


@torch.no_grad()
def run_encoder(
    tower: Tower,
    case: EncoderCase,
    command: str,
    *,
    recipes: Sequence[str] = RECIPES,
    use_graphs: bool = False,
    folder: Path | None = None,
) -> tuple[list[Measurement], list[Objection]]:
    """The records of all who can run this case, and who could not.

    use_graphs: also by CUDA graphs, those who can be captured. folder: may hold peers, whose
    attention then takes part inside the stock tower, and the fastest one inside ours in BF16.
    """
    rows = encoder_rows(recipes)
    device = next(tower.module.parameters()).device
    if use_graphs and device.type != "cuda":
        raise UnsupportedError(f"CUDA graphs need a CUDA GPU, got a tower on {device}")
    inputs = make_pixels(tower.module, case.sizes)
    truth = _truth(tower, inputs)
    with peer_impls.registered(folder, device) as names:
        entries, objections = _enter(tower, rows, inputs, folder, names)
        checked, refused = _check_all(entries, inputs, truth, case.num_images, use_graphs)
        num_tokens = {"tokens": float(len(inputs["hidden_states"]))}
        timed = []
        for one in checked:
            times = time_alone(one.call, device, num_samples=NUM_SAMPLES)
            timed.append(replace(one, values={**times, **one.values, **num_tokens}))
    return _records(tower, case, timed, device, command), objections + refused


def _truth(tower: Tower, inputs: Mapping[str, Tensor]) -> _Truth:
    stock = twin(tower.module)
    use_attention(stock, STOCK)
    names = list(find_layers(stock))
    some = sorted({0, len(names) // 2, len(names) - 1})
    with recorded_calls(stock, [names[i] for i in some]) as calls:
        result = stock(**inputs).pooler_output
    return _Truth(result, calls)


def _enter(
    tower: Tower,
    rows: Sequence[Row],
    inputs: Mapping[str, Tensor],
    folder: Path | None,
    peers: Sequence[str],
) -> tuple[list[_Entry], list[Objection]]:
    """Towers that share their weights, each with its own attention; the stock ones come first."""
    found: list[_Entry] = []
    objections: list[Objection] = []

    def attend(name: str, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        """A peer's BF16 attention of all images in one call, without the checks of our op."""
        return peer_impls.PEERS[name](folder, False, Inputs((q, k, v), packing))()

    for row in sorted(rows, key=lambda row: not row.is_plain):
        for name in (STOCK, *peers) if row.is_plain else ("octavo",):
            entry = _Entry(name, row, twin(tower.module))
            try:
                if row.is_plain:
                    own = None if name == STOCK else partial(attend, name)
                    use_attention(entry.tower, name, own)
                else:
                    apply_(entry.tower, _recipe(tower, row, inputs))
                    peer = _use_fastest(entry.tower, inputs, peers) if entry.is_fused else None
                    entry = entry if peer is None else replace(entry, name=f"octavo with {peer}")
            except UnsupportedError as error:
                objections.append(entry.objection(error))
                continue
            found.append(entry)
    return found, objections


def _use_fastest(tower: Any, inputs: Mapping[str, Tensor], peers: Sequence[str]) -> str | None:
    """Let a tower in BF16 attend by the fastest peer, if it is faster than what is ours."""
    layers = [m for m in tower.modules() if isinstance(m, EncoderAttention)]
    sizes = (layers[0].num_heads, layers[0].head_dim)
    lengths = inputs["grid_thw"].prod(dim=1).tolist()
    peer = peer_impls.find_fastest(peers, *sizes, lengths, inputs["hidden_states"].device)
    for layer in layers:
        layer.impl = peer
    return peer


def _recipe(tower: Tower, row: Row, inputs: Mapping[str, Tensor]) -> Recipe:
    """The recipe of a row; static scales are those of this run's own images."""
    scales: dict[str, dict[str, float]] = {}
    if row.needs_scales:
        seen = twin(tower.module)
        apply_(seen, Recipe(vision_attention="fp8"))
        seen(**inputs)
        for layer in seen.modules():
            if isinstance(layer, EncoderAttention) and isinstance(layer.scaling, DynamicScaling):
                own = layer.scaling.scales()
                found = {"q": float(own.q), "k": float(own.k), "v": float(own.v)}
                scales[scale_name(layer.name)] = found
    recipe = row.recipe(scales)
    assert recipe is not None
    return recipe


def _check_all(
    entries: Sequence[_Entry],
    inputs: Mapping[str, Tensor],
    truth: _Truth,
    num_images: int,
    use_graphs: bool,
) -> tuple[list[_Entry], list[Objection]]:
    """Who can run and is right, eagerly and, if asked, by graphs; and who cannot."""
    found: list[_Entry] = []
    objections: list[Objection] = []
    for entry in entries:
        call = partial(entry.tower, **inputs)
        try:
            result = call()
        except UnsupportedError as error:
            objections.append(entry.objection(error))
            continue
        eager = replace(entry, call=call, values=_check(entry, truth, result))
        found.append(eager)
        if not use_graphs:
            continue
        budget = len(inputs["hidden_states"])
        graphs = VisionGraphs(entry.tower, [budget], max_sequences=num_images)
        by_graph = replace(eager, is_graph=True, call=partial(graphs, **inputs, is_required=True))
        plan = graphs.plan(inputs["grid_thw"])
        if plan.budget is None:
            objections.append(by_graph.objection(plan.reason))
            continue
        of_graph = _check_replay(by_graph, truth, call)
        found.append(replace(by_graph, values={**eager.values, **of_graph}))
    return found, objections


def _check(entry: _Entry, truth: _Truth, result: Any) -> dict[str, float]:
    """How far attention and the whole tower are from stock; raises if attention is wrong."""
    with history_kept(entry.tower):
        errors = [
            relative_rms(entry.tower.get_submodule(name)(*args, **kwargs), expected)
            for name, (args, kwargs, expected) in truth.layers.items()
        ]
    of_attention = float(np.max(errors))
    limit = MAX_ERROR["BF16" if entry.row.is_plain or entry.is_fused else "FP8"]
    who, wanted = f"encoder with {entry}", f"attention with a relative error of at most {limit}"
    expect_within(limit, of_attention, who, wanted)
    of_tower = relative_rms(result.pooler_output, truth.result)
    expect_within(math.inf, of_tower, who, "a finite result")
    return {"relative_rms": of_attention, "tower_relative_rms": of_tower}


def _check_replay(entry: _Entry, truth: _Truth, call: Call) -> dict[str, float]:
    """How far a replay is from stock and from the same tower's eager call; raises if it is far."""
    with history_kept(entry.tower):
        expected = _outputs(call())
    with history_kept(entry.tower):  # both begin with the same scales
        result = entry.call()
    pairs = zip(_outputs(result), expected, strict=True)
    of_graph = float(np.max([relative_rms(actual, eager) for actual, eager in pairs]))
    wanted = f"the eager tower's result with a relative error of at most {MAX_GRAPH_ERROR}"
    expect_within(MAX_GRAPH_ERROR, of_graph, f"encoder with {entry}", wanted)
    of_tower = relative_rms(result.pooler_output, truth.result)
    return {"tower_relative_rms": of_tower, "graph_relative_rms": of_graph}


def _outputs(result: Any) -> list[Tensor]:
    """What a language model takes of a tower's result."""
    return [result.pooler_output, *(getattr(result, "deepstack_features", None) or ())]


def _records(
    tower: Tower, case: EncoderCase, timed: list[_Entry], device: torch.device, command: str
) -> list[Measurement]:
    # Stock is what a user has without octavo: no graphs, and no attention of ours.
    stock = [one for one in timed if one.row.is_plain and not one.is_graph]
    first = min(stock, key=lambda one: one.values["median_ms"], default=None)
    fused = {one.is_graph: one for one in timed if one.is_fused}
    record = partial(
        Measurement,
        op="encoder",
        machine=machine_of(device),
        command=command,
        baseline=None if first is None else f"transformers {first.name} BF16",
    )
    records = []
    for one in timed:
        values = dict(one.values)
        for name, other in (("speedup", first), ("fused_speedup", fused.get(one.is_graph))):
            if other is not None:
                values[name] = other.values["median_ms"] / values["median_ms"]
        about: dict[str, Scalar] = {
            "model": tower.name,
            "weights": tower.weights,
            "layers": tower.num_layers,
            "resolution": case.resolution,
            "images": case.num_images,
            "recipe": one.row.name,
            "graphs": one.is_graph,
        }
        records.append(record(impl=one.name, case=about, values=values))
    return records

"""A whole vision tower: stock in BF16, ours in BF16, and in FP8 with dynamic or static scales.

All who take part have the same weights and get the same images. Before anyone is timed, attention
of some layers is compared with stock transformers', on the inputs that those layers have there, and
a graph's result with that of the same tower without a graph; no check leaves a trace in scales. On
a GPU each is timed after it has had the GPU to itself for a second: BF16 attention leaves a lower
clock to whoever comes next.

Two baselines: the fastest stock tower is what a user has without octavo; ours in BF16, with the
fusions of the FP8 path and the fastest BF16 attention at hand, tells what FP8 itself buys.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.apply import apply_
from octavo.integrations.transformers.vision import find_layers, scale_name
from octavo.integrations.transformers.vision_graphs import VisionGraphs, history_kept
from octavo.integrations.transformers.vision_tower import (
    PackedAttention,
    Tower,
    make_pixels,
    recorded_calls,
    twin,
    use_attention,
)
from octavo.kernels.device import describe
from octavo.layers.encoder_attention import EncoderAttention
from octavo.layers.scaling import DynamicScaling
from octavo.measure.bench import peer_impls
from octavo.measure.bench.attention import MAX_ERROR
from octavo.measure.bench.benchmark import Objection
from octavo.measure.bench.timing import sample_ms, sample_sustained_ms
from octavo.measure.records import Machine, Measurement, Scalar, timing
from octavo.numerics.error import relative_rms
from octavo.recipe import Recipe

# (height, width) of one image, before it is rounded to whole patches.
RESOLUTIONS: Mapping[str, tuple[int, int]] = {
    "hd": (720, 1280),
    "fullhd": (1080, 1920),
    "qhd": (1440, 2560),
    "4k": (2160, 3840),
}
FUSED = "fused-bf16"
RECIPES = ("bf16", FUSED, "dynamic", "static")
STOCK = "sdpa"
LOAD_S, NUM_SAMPLES = 1.0, 5
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
        if self.resolution not in RESOLUTIONS:
            expected = ", ".join(RESOLUTIONS)
            raise ConfigError(f"expected resolutions of {expected}; got {self.resolution!r}")
        if self.num_images < 1:
            raise ConfigError(f"expected at least one image, got {self.num_images}")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each image."""
        return [RESOLUTIONS[self.resolution]] * self.num_images


@dataclass(frozen=True)
class _Contender:
    name: str
    recipe: str
    tower: Any


@dataclass(frozen=True)
class _Truth:
    """What stock transformers gives: the tower's result, and some layers' calls."""

    result: Tensor
    layers: Mapping[str, tuple[tuple[Any, ...], dict[str, Any], Tensor]]


def check_recipes(recipes: Sequence[str]) -> None:
    """Raise unless all are recipes of RECIPES, one or more."""
    unknown = [name for name in recipes if name not in RECIPES]
    if unknown or not recipes:
        raise ConfigError(
            f"expected recipes of {', '.join(RECIPES)}; got {', '.join(unknown) or 'none'}"
        )


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
    attention then takes part inside the stock tower, and the fastest one inside ours in BF16. The
    baseline of "speedup" is the fastest stock tower, without graphs; that of "fused_speedup" is
    ours in BF16, by graphs for those who run by graphs.
    """
    check_recipes(recipes)
    device = next(tower.module.parameters()).device
    if use_graphs and device.type != "cuda":
        raise UnsupportedError(f"CUDA graphs need a CUDA GPU, got a tower on {device}")
    inputs = make_pixels(tower.module, case.sizes)
    truth = _truth(tower, inputs)
    names = tuple(peer_impls.PEERS) if device.type == "cuda" else ()
    with peer_impls.registered(folder, names):
        contenders, objections = _contenders(tower, recipes, inputs, folder, names)
        entered, refused = _enter(contenders, inputs, truth, case.num_images, use_graphs)
        num_tokens = len(inputs["hidden_states"])
        rows = [
            (contender, is_graph, _sample(call, device) | values | {"tokens": float(num_tokens)})
            for contender, is_graph, call, values in entered
        ]
    return _records(tower, case, rows, device, command), objections + refused


def _enter(
    contenders: Sequence[_Contender],
    inputs: Mapping[str, Tensor],
    truth: _Truth,
    num_images: int,
    use_graphs: bool,
) -> tuple[list[tuple[_Contender, bool, Call, dict[str, float]]], list[Objection]]:
    """Who can run and is right: (contender, whether by graphs, call, errors); and who cannot."""
    entered: list[tuple[_Contender, bool, Call, dict[str, float]]] = []
    objections: list[Objection] = []
    for contender in contenders:
        call = partial(contender.tower, **inputs)
        try:
            result = call()
        except UnsupportedError as error:
            objections.append(Objection("encoder", contender.name, contender.recipe, str(error)))
            continue
        errors = _check(contender, truth, result)
        entered.append((contender, False, call, errors))
        if not use_graphs:
            continue
        budget = len(inputs["hidden_states"])
        graphs = VisionGraphs(contender.tower, [budget], max_sequences=num_images)
        plan = graphs.plan(inputs["grid_thw"])
        if plan.budget is None:
            name = f"{contender.name} by graphs"
            objections.append(Objection("encoder", name, contender.recipe, plan.reason))
            continue
        replay = partial(graphs, **inputs, is_required=True)
        of_graph = _check_replay(contender, truth, call, replay)
        entered.append((contender, True, replay, errors | of_graph))
    return entered, objections


def _truth(tower: Tower, inputs: Mapping[str, Tensor]) -> _Truth:
    stock = twin(tower.module)
    use_attention(stock, STOCK)
    names = list(find_layers(stock))
    some = sorted({0, len(names) // 2, len(names) - 1})
    with recorded_calls(stock, [names[i] for i in some]) as calls:
        result = stock(**inputs).pooler_output
    return _Truth(result, calls)


def _contenders(
    tower: Tower,
    recipes: Sequence[str],
    inputs: Mapping[str, Tensor],
    folder: Path | None,
    peers: Sequence[str],
) -> tuple[list[_Contender], list[Objection]]:
    """Towers that share their weights, each with its own attention."""
    found: list[_Contender] = []
    objections: list[Objection] = []
    if "bf16" in recipes:
        stock = twin(tower.module)
        use_attention(stock, STOCK)
        found.append(_Contender(STOCK, "bf16", stock))
        for name, attend in _peers_attention(folder, peers).items():
            other = twin(tower.module)
            use_attention(other, name, attend)
            found.append(_Contender(name, "bf16", other))
    for recipe in (recipe for recipe in recipes if recipe != "bf16"):
        other, name = twin(tower.module), "octavo"
        try:
            apply_(other, _recipe(tower, recipe, inputs))
            if recipe == FUSED and (peer := _use_fastest(other, inputs, peers)) is not None:
                name = f"octavo with {peer}"
        except UnsupportedError as error:
            objections.append(Objection("encoder", name, recipe, str(error)))
            continue
        found.append(_Contender(name, recipe, other))
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


def _recipe(tower: Tower, name: str, inputs: Mapping[str, Tensor]) -> Recipe:
    """The recipe of a name; static scales are those of this run's own images."""
    if name == FUSED:
        return Recipe(vision_attention="bf16")
    dynamic = Recipe(vision_attention="fp8")
    if name == "dynamic":
        return dynamic
    seen = twin(tower.module)
    apply_(seen, dynamic)
    seen(**inputs)
    return Recipe(vision_attention={"scaling": "static"}, scales=_scales(seen))


def _peers_attention(folder: Path | None, names: Sequence[str]) -> dict[str, PackedAttention]:
    """Peers' BF16 attention of all images in one call, without the checks of our op."""

    def peer(name: str, *qkv_and_packing: Any) -> Tensor:
        *qkv, packing = qkv_and_packing
        return peer_impls.PEERS[name](folder, False, *qkv, False, packing)()

    return {name: partial(peer, name) for name in names}


def _scales(tower: Any) -> dict[str, dict[str, float]]:
    """What a scale file would have of a tower's dynamic scales."""
    found = {}
    for layer in tower.modules():
        if isinstance(layer, EncoderAttention) and isinstance(layer.scaling, DynamicScaling):
            scales = layer.scaling.scales()
            parts = {"q": scales.q, "k": scales.k, "v": scales.v}
            found[scale_name(layer.name)] = {name: float(x) for name, x in parts.items()}
    return found


def _check(contender: _Contender, truth: _Truth, result: Any) -> dict[str, float]:
    """How far attention and the whole tower are from stock; raises if attention is wrong."""
    errors = []
    with history_kept(contender.tower):
        for name, (args, kwargs, expected) in truth.layers.items():
            actual = contender.tower.get_submodule(name)(*args, **kwargs)
            errors.append(relative_rms(actual, expected))
    worst = _worst(errors)
    limit = MAX_ERROR["BF16" if contender.recipe in ("bf16", FUSED) else "FP8"]
    of_tower = relative_rms(result.pooler_output, truth.result)
    if not worst <= limit or math.isnan(of_tower):
        raise UnsupportedError(
            f"encoder with {contender.name}, {contender.recipe} eagerly is wrong: expected "
            f"attention with a relative error of at most {limit} and a finite result, got "
            f"{worst:.3g} and {of_tower:.3g}"
        )
    return {"relative_rms": worst, "tower_relative_rms": of_tower}


def _check_replay(
    contender: _Contender, truth: _Truth, call: Call, replay: Call
) -> dict[str, float]:
    """How far a replay is from stock and from the same tower's eager call; raises if it is far."""
    with history_kept(contender.tower):
        expected = _outputs(call())
    with history_kept(contender.tower):  # both begin with the same scales
        result = replay()
    pairs = zip(_outputs(result), expected, strict=True)
    of_graph = _worst([relative_rms(actual, eager) for actual, eager in pairs])
    if not of_graph <= MAX_GRAPH_ERROR:
        raise UnsupportedError(
            f"encoder with {contender.name}, {contender.recipe} by graphs is wrong: expected the "
            f"eager tower's result with a relative error of at most {MAX_GRAPH_ERROR}, got "
            f"{of_graph:.3g}"
        )
    of_tower = relative_rms(result.pooler_output, truth.result)
    return {"tower_relative_rms": of_tower, "graph_relative_rms": of_graph}


def _outputs(result: Any) -> list[Tensor]:
    """What a language model takes of a tower's result."""
    return [result.pooler_output, *(getattr(result, "deepstack_features", None) or ())]


def _worst(errors: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _sample(call: Call, device: torch.device) -> dict[str, float]:
    """Times of a call by itself and, on a GPU, the clock and the power it had."""
    if device.type != "cuda":
        return timing(sample_ms(call, device, warmup_ms=0.0, budget_ms=0.0, min_samples=3))
    load = sample_sustained_ms(call, load_s=LOAD_S, num_samples=NUM_SAMPLES)
    return timing(load.samples_ms) | {"sm_mhz": load.sm_mhz, "watts": load.watts}


def _records(
    tower: Tower,
    case: EncoderCase,
    rows: list[tuple[_Contender, bool, dict[str, float]]],
    device: torch.device,
    command: str,
) -> list[Measurement]:
    described = describe(device)
    machine = Machine.current(gpu=described.gpu, capability=described.capability)
    # Stock is what a user has without octavo: no graphs, and no attention of ours.
    stock = [
        (values["median_ms"], contender.name)
        for contender, is_graph, values in rows
        if contender.recipe == "bf16" and not is_graph
    ]
    baseline_ms, baseline = min(stock, default=(math.nan, None))
    fused_ms = {g: values["median_ms"] for row, g, values in rows if row.recipe == FUSED}
    records = []
    for contender, is_graph, values in rows:
        about: dict[str, Scalar] = {
            "model": tower.name,
            "weights": tower.weights,
            "layers": tower.num_layers,
            "resolution": case.resolution,
            "images": case.num_images,
            "recipe": contender.recipe,
            "graphs": is_graph,
        }
        if baseline is not None:
            values = values | {"speedup": baseline_ms / values["median_ms"]}
        if is_graph in fused_ms:
            values = values | {"fused_speedup": fused_ms[is_graph] / values["median_ms"]}
        records.append(
            Measurement(
                op="encoder",
                impl=contender.name,
                case=about,
                values=values,
                machine=machine,
                command=command,
                baseline=None if baseline is None else f"transformers {baseline} BF16",
            )
        )
    return records

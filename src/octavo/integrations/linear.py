"""Which linear layers of a model are quantized, and their replacement in place.

A plan comes first: it names every layer that will be quantized and every one that is left alone,
with the reason, and all that can be wrong is found before anything changes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from octavo.brief import list_names
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.fused_layers import shards_of
from octavo.integrations.output_heads import OUTPUT_HEAD, find_heads
from octavo.internals import internals
from octavo.layers.linear import ALIGNMENT, WITHOUT_FP8, Fp8Linear, check_weight
from octavo.layers.saturation import EVERY, WATCH, Saturation, SaturationCounter
from octavo.ops.check import check_fp8_device
from octavo.patterns import Layer, match_layers
from octavo.recipe import LinearSettings

# Why linear layers stay in BF16, in diffusion transformers and omni models.
MODULATION = "modulation: an error in it is one in every token of its block"
TIME = "time and guidance embedding: every block depends on it, and it is one token"
INPUT = "an input projection: every block depends on it"
OUTPUT = "an output projection: its errors are the result's"
REFINER = "refines the prompt, once for a step: nothing to gain"
CONNECTOR = "connects another modality: every block depends on it"
# Hold against included_layers, which quantize activations as well.
REQUIRED = frozenset({MODULATION, TIME, INPUT, OUTPUT, REFINER, CONNECTOR})
# Hold against weight_only_layers. Modulation is one row for a step: what it costs is to be read,
# and with an FP8 weight alone the small image model lost next to nothing.
FIRM = REQUIRED - {MODULATION}

ENCODER = "an encoder of an omni model: once for each input, and not validated in FP8"
TALKER = "makes speech codes one after the other: each error is in all that follow; not validated"
WAVEFORM = "makes the waveform: its errors are heard; not validated in FP8"

KEPT_PARTS: Mapping[str, str] = {
    "Qwen3OmniMoeAudioEncoder": ENCODER,
    "Qwen3OmniMoeVisionEncoder": ENCODER,
    "Qwen3OmniMoeTalkerForConditionalGeneration": TALKER,
    "Qwen3OmniMoeCode2Wav": WAVEFORM,
}

with internals("torch"):
    from torch.nn.modules.conv import _ConvNd

IGNORED = "ignored_layers"
# Layers left alone by default, by the last component of their names.
SENSITIVE_NAMES = {
    "lm_head": OUTPUT_HEAD,
    "gate": "a router of experts",
    "router": "a router of experts",
}
# Modules that read the weights of the linear layers inside them, past their forward.
WEIGHT_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class LinearPlan:
    """The linear layers of a model: which are quantized, and which are left alone and why.

    chosen: the names under which the model has each layer, by the first of them. weight_only: those
    of them whose weight alone is quantized, whatever the settings of all are.
    """

    chosen: dict[str, tuple[str, ...]]
    left: dict[str, str]
    weight_only: frozenset[str] = frozenset()

    def settings_of(self, name: str, settings: LinearSettings) -> LinearSettings:
        """The settings of one layer; settings: those of all."""
        return settings.weight_only() if name in self.weight_only else settings

    def with_inputs(self) -> list[str]:
        """The layers whose inputs are quantized as the settings of all say."""
        return [name for name in self.chosen if name not in self.weight_only]


def plan_linear(
    model: nn.Module,
    ignored_layers: Sequence[str] = (),
    kept: Mapping[str, str] = MappingProxyType({}),
    weight_only_layers: Sequence[str] = (),
) -> LinearPlan:
    """What to quantize in a model; it is an error if nothing is, or if something is already.

    kept: layers that stay by what is known of the model, with the reason. weight_only_layers:
    patterns of layers whose weight alone is quantized, also of those that are kept; one that has to
    stay, or is ignored as well, is an error.
    """
    places = _places(model)
    modules = {names[0]: model.get_submodule(names[0]) for names in places}
    if done := [name for name, module in modules.items() if isinstance(module, Fp8Linear)]:
        raise ConfigError(
            f"expected a model with plain linear layers, got {len(done)} in FP8 already, such as "
            f"{done[0]}: a checkpoint in FP8 runs as it is, so leave --quantization, or the "
            "recipe's linear, out"
        )
    if type(model) is nn.Linear:
        raise ConfigError(
            "expected a model with linear layers inside it, got an nn.Linear: "
            "Fp8Linear.from_linear makes one of it"
        )
    others = {n: _other_kind(m) for n, m in modules.items() if type(m) is not nn.Linear}
    named = {name: reason for name, reason in others.items() if reason is not None}
    plain = {name for name, module in modules.items() if type(module) is nn.Linear}
    layers = [
        Layer(name, layer_index(name), is_modulation=kept.get(name) == MODULATION)
        for name in modules
        if name in named or name in plain
    ]
    ignored = {layer.name for layer in match_layers(ignored_layers, layers)}
    named |= {name: reason for name, reason in _defaults(model, modules) if name in plain}
    weight_only = [layer.name for layer in match_layers(weight_only_layers, layers)]
    firm = {name: reason for name, reason in kept.items() if reason in FIRM}
    _check_weight_only(weight_only, named | firm, ignored)
    named |= {name: reason for name, reason in kept.items() if name in plain}
    named = {name: reason for name, reason in named.items() if name not in weight_only}
    named |= dict.fromkeys(ignored, IGNORED)
    chosen = {names[0]: names for names in places if names[0] in plain and names[0] not in named}
    if not chosen:
        reasons = [f"{name} ({reason})" for name, reason in named.items()]
        raise ConfigError(
            f"expected linear layers to quantize, got none in {type(model).__name__}; left alone "
            f"are {list_names(reasons) or 'none'}"
        )
    left = {name: named[name] for name in modules if name in named}
    return LinearPlan(chosen, left, frozenset(weight_only))


def _check_weight_only(names: Iterable[str], firm: Mapping[str, str], ignored: set[str]) -> None:
    """Raise for layers of weight_only_layers that must stay, or that are to be ignored."""
    if both := [name for name in names if name in ignored]:
        raise ConfigError(
            "expected layers in ignored_layers or in weight_only_layers, got in both: "
            f"{list_names(both)}"
        )
    if stay := [name for name in names if name in firm]:
        raise ConfigError(
            f"weight_only_layers: expected layers that can be quantized, got {list_names(stay)}: "
            f"{stay[0]} stays as it is ({firm[stay[0]]})"
        )


def check_linear(
    model: nn.Module, plan: LinearPlan, settings: LinearSettings, scales: ScaleSet | None
) -> None:
    """Raise whatever `quantize_linear_` would find wrong with a layer."""
    if settings.scaling == "static":
        if scales is None:
            raise ConfigError("expected scales for scaling 'static', got none: Recipe(scales=…)")
        scales.require_kind("linear")
        scales.require_inputs(plan.with_inputs())
    for name in plan.chosen:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        if "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS):
            raise UnsupportedError(
                f"{name}: expected a linear layer without hooks, got some, which its replacement "
                "would lose: remove them (offloaded weights have hooks, too) or ignore the layer"
            )
        if plan.settings_of(name, settings).activation is not None:
            check_fp8_device(name, module.weight.device, None, instead=WITHOUT_FP8)
        check_weight(module.weight, name)


@torch.no_grad()
def quantize_linear_(
    model: nn.Module, plan: LinearPlan, settings: LinearSettings, scales: ScaleSet | None
) -> list[str]:
    """Replace the chosen layers, one after the other: no more than one is there twice."""
    for name, places in plan.chosen.items():
        plain = model.get_submodule(name)
        assert isinstance(plain, nn.Linear)
        own = plan.settings_of(name, settings)
        is_static = scales is not None and own.scaling == "static"
        input_scale = scales.inputs[name] if is_static and scales is not None else None
        shards = shards_of(model, name, plain, own)
        made = Fp8Linear.from_linear(plain, own, input_scale=input_scale, shards=shards, name=name)
        put_linear_(model, places, made)
        del plain
    return list(plan.chosen)


def put_linear_(model: nn.Module, places: Iterable[str], layer: nn.Linear) -> None:
    """Put a layer in all its places in a model."""
    for place in places:
        parent, _, leaf = place.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)


def find_converted(model: nn.Module) -> list[str]:
    """The FP8 layers whose plain weights are gone."""
    return [n for n, m in model.named_modules() if isinstance(m, Fp8Linear) and m.is_converted]


def find_linear(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with weights like a linear layer's, by name: FP8 layers and experts as well."""
    return {n: m for n, m in model.named_modules() if _other_kind(m) is not None}


def _places(model: nn.Module) -> list[tuple[str, ...]]:
    """Every module inside a model, with all names that it has there."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            places.setdefault(id(module), []).append(name)
    return [tuple(names) for names in places.values()]


def _other_kind(module: nn.Module) -> str | None:
    """Why a module with weights like a linear layer's is not quantized; None if it has none."""
    kind = type(module).__name__
    if isinstance(module, nn.Linear):
        return f"{kind}, not a plain nn.Linear"
    is_torchs = type(module).__module__.startswith("torch.nn")
    if is_torchs or isinstance(module, nn.Embedding | _ConvNd):
        return None
    for name, x in module.named_parameters(recurse=False):
        if x.is_floating_point() and x.dim() >= 2 and (name == "weight" or name.endswith("proj")):
            return f"{kind}, not a plain nn.Linear"
    return None


def _defaults(model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Layers that are left alone unasked, with the reason."""
    for name, module in modules.items():
        if (
            isinstance(module, nn.Linear)
            and min(module.in_features, module.out_features) < ALIGNMENT
        ):
            yield name, f"small: {module.in_features} to {module.out_features}"
    yield from _tied(model)
    for name in modules:
        if (reason := SENSITIVE_NAMES.get(name.rpartition(".")[2])) is not None:
            yield name, reason
    yield from ((name, OUTPUT_HEAD) for name in find_heads(model))
    for prefix, part in [("", model), *modules.items()]:
        kind = type(part).__name__
        reasons = [KEPT_PARTS[kind]] if prefix and kind in KEPT_PARTS else []
        if isinstance(part, WEIGHT_READERS):
            reasons.append(f"{kind} reads its weight")
        if hasattr(part, "base_layer"):
            reasons.append(f"part of {kind}, an adapter: quantize before adding it")
        kept = _kept_in_float32(part)
        if not reasons and not kept:
            continue
        for name in modules:
            if not prefix or name.startswith(f"{prefix}."):
                yield from ((name, reason) for reason in reasons)
                if any(f".{one}." in f".{name.removeprefix(prefix)}." for one in kept):
                    yield name, "its model keeps it in float32"


def _tied(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Layers that share a weight with another module, such as a head with the embedding."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for x in module.parameters(recurse=False):
            owners.setdefault(id(x), []).append(name)
    # On the meta device transformers has announced what it will tie, but not done it.
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        first, second = (key.rpartition(".")[0] for key in pair)
        yield from ((first, f"tied to {second}"), (second, f"tied to {first}"))
    for names in owners.values():
        for name in names if len(names) > 1 else ():
            others = [other for other in names if other != name]
            yield name, f"tied to {others[0]}" if others else "tied to itself"


def _kept_in_float32(module: nn.Module) -> set[str]:
    """What transformers and diffusers keep in float32 when a model is loaded in 16 bits."""
    lists = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {name for attribute in lists for name in getattr(module, attribute, None) or ()}


def layer_index(name: str) -> int | None:
    """The first number among the components of a name: which layer or block it is in."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def read_saturation(model: nn.Module) -> dict[str, Saturation]:
    """What each layer with a static input scale has counted so far; waits for the device.

    Layers count in their first 16 calls and then in one of 64 (`count_every_call`: in all), and
    only where the model runs eagerly: compiled and captured calls are not counted. Layers that
    are one product of the same input count together.
    """
    return {name: counter.read() for name, counter in find_counters(model).items()}


@contextmanager
def count_every_call(model: nn.Module) -> Iterator[None]:
    """Count afresh, and in every call; warns of layers that saturate at the end, if not before."""
    counters = list(find_counters(model).values())
    for counter in counters:
        counter.reset(every=1)
    try:
        yield
        WATCH.look()
    finally:
        for counter in counters:
            counter.every = EVERY


def find_counters(model: nn.Module) -> dict[str, SaturationCounter]:
    """The counter of each layer with a static input scale; layers may share one."""
    return {
        name: module.saturation
        for name, module in model.named_modules()
        if isinstance(module, Fp8Linear) and module.saturation is not None
    }

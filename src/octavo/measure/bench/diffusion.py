"""One step of a diffusion transformer: BF16 with its fastest attention beside FP8, all compiled.

All have the same weights and inputs. Before anyone is timed, linear and attention layers of some
blocks are compared with the BF16 model's on the inputs that they have there, and the compiled model
with itself before it was compiled.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.brief import list_names
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.apply import apply_
from octavo.integrations.calibrate_linear import calibrate_linear
from octavo.integrations.diffusers import full_size
from octavo.integrations.diffusers.attention import find_layers, observe_attention
from octavo.integrations.diffusers.linear import use_faster_forms_
from octavo.integrations.diffusers.step_graphs import GRAPHS, use_step_graphs_
from octavo.integrations.transformers.vision_tower import recorded_calls
from octavo.measure.bench import peer_impls
from octavo.measure.bench.benchmark import Objection, read_rows
from octavo.measure.bench.expect import expect, expect_within
from octavo.measure.bench.timing import capture, fastest, machine_of, time_alone
from octavo.measure.records import Measurement, Scalar
from octavo.measure.rows import DIFFUSION, Row
from octavo.numerics.error import relative_rms
from octavo.recipe import AttentionSettings

BF16 = "bf16"
# What of a recipe is no FP8: how much faster the model is with its layers' faster forms alone.
FASTER = "bf16-faster"
_Call = tuple[tuple[Any, ...], dict[str, Any], Any]
NUM_SAMPLES = 7
# Relative RMS against the same layer in BF16. Quantizing both operands of a product costs 0.037 on
# normal values; an attention layer has up to two products and attention between them, in a row.
MAX_LINEAR_ERROR, MAX_ATTENTION_ERROR = 0.057, 0.12
# Compiling rounds elsewhere; more than this must be less than what FP8 itself costs.
MAX_COMPILED_ERROR = 0.02
# A replay runs the same kernels; cuBLAS may have another workspace.
MAX_GRAPH_ERROR = 0.005


@dataclass(frozen=True)
class StepCase:
    """One step of a model of this size, by these recipes.

    num_layers: so many blocks of each kind; None is all. use_graphs: by CUDA graphs as well.
    """

    size: str
    recipes: tuple[str, ...] = (BF16, "linear", "linear+attention")
    num_layers: int | None = None
    is_compiled: bool = True
    use_graphs: bool = False

    def __post_init__(self) -> None:
        full_size.find_full_size(self.size)
        names = ", ".join(self.recipes) or "none"
        expect(BF16 in self.recipes, f"{BF16}, the baseline, among the recipes", names)
        self.rows()

    def rows(self) -> list[Row]:
        """The rows of the recipes."""
        return read_rows(self.recipes, DIFFUSION, (BF16, FASTER))


@dataclass(frozen=True)
class _Plain:
    """The BF16 model, what it gave, and calls of some of its layers by kind: arguments, result."""

    model: nn.Module
    inputs: Mapping[str, Any]
    result: Tensor
    linear: Mapping[str, _Call]
    attention: Mapping[str, _Call]


_Timed = tuple[bool, dict[str, float]]  # whether by graphs, and the values of the record


@torch.no_grad()
def run_step(
    case: StepCase, device: torch.device, command: str, folder: Path | None = None
) -> Iterator[tuple[list[Measurement], list[Objection]]]:
    """Each recipe's records when it is done, BF16 first, and who could not take part.

    The fastest in BF16 is the baseline. folder: may hold peers; the fastest BF16 attention at hand
    is that of the baseline, and of FP8 linear layers beside attention in BF16.
    """
    if case.use_graphs and device.type != "cuda":
        raise UnsupportedError(f"CUDA graphs need a CUDA GPU, got {device}")
    size = full_size.find_full_size(case.size)
    model = full_size.make_transformer(size, device, num_layers=case.num_layers)
    inputs = full_size.make_inputs(size, device)
    with peer_impls.registered(folder, device) as peers:
        attention, objections = _fastest_attention(model, inputs, ("native", "cudnn", *peers))
        full_size.use_bf16_attention_(model, attention)
        plain = _run_plain(model, inputs)
        in_bf16: list[_Timed] = []
        for row in sorted(case.rows(), key=lambda row: row.name != BF16):
            records: list[Measurement] = []
            try:
                timed = _measure(case, row, plain)
                in_bf16 = in_bf16 or (timed if row.name == BF16 else [])
                if in_bf16:
                    records = _records(case, row, timed, in_bf16, attention, device, command)
            except UnsupportedError as error:
                objections.append(Objection("diffusion_step", "octavo", row.name, str(error)))
            # What compiling has kept of the last model: two of them may be all that fits.
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
            yield records, objections
            objections = []


def _fastest_attention(
    model: nn.Module, inputs: Mapping[str, Any], names: Sequence[str]
) -> tuple[str, list[Objection]]:
    """The fastest BF16 attention for the first attention layer's own q, k and v."""
    name, layer = next(iter(find_layers(model).items()))
    with recorded_calls(model, [name]) as seen:
        model(**inputs)
    args, kwargs, expected = seen[name]
    device = next(model.parameters()).device
    calls: dict[str, Callable[[], Any]] = {}
    objections: list[Objection] = []
    for candidate in names:
        holder = nn.ModuleList([copy.deepcopy(layer)])
        full_size.use_bf16_attention_(holder, candidate)
        attend = partial(holder[0], *args, **kwargs)
        try:
            error = _error(attend(), expected)
            # By graphs: else the host's time decides, which is the same for all.
            timed = capture([attend]) if device.type == "cuda" else attend
        except (UnsupportedError, RuntimeError) as reason:
            text = str(reason).partition("\n")[0] or type(reason).__name__
            objections.append(Objection("diffusion_step", candidate, "BF16", text))
            continue
        expect_within(0.02, error, candidate)
        calls[candidate] = timed
    if not calls:
        reasons = [f"{o.name}: {o.reason}" for o in objections]
        raise UnsupportedError(f"expected an attention that runs, got none: {list_names(reasons)}")
    return fastest(calls, device), objections


def _run_plain(model: nn.Module, inputs: Mapping[str, Any]) -> _Plain:
    """The BF16 model's own result, and its layers in the first and the last block."""
    blocks = list(full_size.repeated_blocks(model))
    some = {blocks[0], blocks[-1]}
    inside = [n for n, _ in model.named_modules() if any(n.startswith(f"{b}.") for b in some)]
    linear = [n for n in inside if isinstance(model.get_submodule(n), nn.Linear)]
    attention = [n for n in inside if n in find_layers(model)]
    with recorded_calls(model, [*linear, *attention]) as calls:
        result = model(**inputs)[0]
    kinds = ({n: calls[n] for n in names if n in calls} for names in (linear, attention))
    return _Plain(model, inputs, result, *kinds)


def _measure(case: StepCase, row: Row, plain: _Plain) -> list[_Timed]:
    """Check one recipe, then time it, by graphs as well if they are asked for."""
    name, device = row.name, plain.result.device
    recipe = row.recipe(_static_scales(row, plain) if row.needs_scales else None)
    model: Any = copy.deepcopy(plain.model)
    if recipe is not None:
        try:
            apply_(model, recipe)
        except ConfigError as error:  # what is not there in the model is no mistake of the user's
            raise UnsupportedError(str(error)) from None
    if name == FASTER:
        use_faster_forms_(model)
    values = _check(name, model, plain)
    call = partial(model, **plain.inputs)
    result = call()[0]
    values["relative_rms"] = relative_rms(result, plain.result)
    limit = max(MAX_COMPILED_ERROR, values["relative_rms"])
    if case.is_compiled:
        model.compile_repeated_blocks(fullgraph=True)
        compiled = call()[0]
        values["compiled_relative_rms"] = _checked(f"{name} compiled", compiled, result, limit)
        result = compiled
    sample = partial(time_alone, call, device, num_samples=NUM_SAMPLES)
    timed = [(False, values | _memory(model, call) | sample())]
    if case.use_graphs:
        use_step_graphs_(model)
        # Joint products round elsewhere, too; a replay is what they are without a graph.
        joint = vars(model)[GRAPHS].run(**plain.inputs)[0]
        joint_error = _checked(f"{name} by joint products", joint, result, limit)
        replayed = _checked(f"{name} by graphs", call()[0], joint, MAX_GRAPH_ERROR)
        own = values | {"joint_relative_rms": joint_error, "graph_relative_rms": replayed}
        timed.append((True, own | sample()))
    return timed


def _static_scales(row: Row, plain: _Plain) -> Any:
    """The static scales that a row needs, found on the inputs of the step itself."""
    scales = calibrate_linear(plain.model, [plain.inputs])
    settings = AttentionSettings.read(row.fields.get("attention"))
    if settings is not None and settings.scaling == "static":
        layers = find_layers(plain.model)
        seen = Calibration(list(layers), CalibrationSettings())
        with observe_attention(layers, seen.see):
            plain.model(**plain.inputs)
        header = replace(scales.header, kind=None)  # no longer of linear layers alone
        scales = replace(scales, layers=seen.result().scales.layers, header=header)
    return scales.to_dict()


def _checked(what: str, actual: Tensor, expected: Tensor, limit: float) -> float:
    """The relative error of a result that should be another's; raises if it is not."""
    wanted = f"what it is without, with a relative error of at most {limit:.3g}"
    return expect_within(limit, relative_rms(actual, expected), what, wanted)


def _check(name: str, model: nn.Module, plain: _Plain) -> dict[str, float]:
    """The worst errors of linear and of attention layers; raises if one is wrong."""
    values = {}
    for kind, calls, limit in (
        ("linear", plain.linear, MAX_LINEAR_ERROR),
        ("attention", plain.attention, MAX_ATTENTION_ERROR),
    ):
        errors = {
            layer: _error(model.get_submodule(layer)(*args, **kwargs), expected)
            for layer, (args, kwargs, expected) in calls.items()
        }
        bad = [f"{layer} {error:.3g}" for layer, error in errors.items() if not error <= limit]
        if bad or not errors:
            raise UnsupportedError(
                f"{name} is wrong: expected {kind} layers with a relative error of at most "
                f"{limit}, got {list_names(bad) or 'no layers'}"
            )
        values[f"{kind}_relative_rms"] = max(errors.values())
    return values


def _error(actual: Any, expected: Any) -> float:
    """The worst relative RMS of one result, or of several in a tuple."""
    if isinstance(expected, Tensor):
        return relative_rms(actual, expected)
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if isinstance(b, Tensor)]
    return float(np.max([relative_rms(a, b) for a, b in pairs]))


def _memory(model: nn.Module, call: Callable[[], Any]) -> dict[str, float]:
    """Bytes of the weights, and the most that a step needs with them."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    weights = float(sum(t.numel() * t.element_size() for t in tensors.values()))
    if not next(model.parameters()).is_cuda:
        return {"weight_bytes": weights}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = weights + torch.cuda.max_memory_allocated() - before
    return {"weight_bytes": weights, "peak_bytes": peak}


def _records(
    case: StepCase,
    row: Row,
    timed: Sequence[_Timed],
    in_bf16: Sequence[_Timed],
    attention: str,
    device: torch.device,
    command: str,
) -> list[Measurement]:
    """The records of a row beside the fastest in BF16."""
    fastest_ms, is_graph = min((values["median_ms"], is_graph) for is_graph, values in in_bf16)
    _, plain = in_bf16[0]  # without graphs: what they keep is no part of a model
    parts = {"compiled": case.is_compiled, "by graphs": is_graph}
    told = [f"diffusers BF16, {attention}", *(part for part, is_told in parts.items() if is_told)]
    has_fp8_attention = row.fields.get("attention") is not None
    records = []
    for is_graph, values in timed:
        about: dict[str, Scalar] = {
            "model": case.size,
            "weights": "random",
            "inputs": full_size.find_full_size(case.size).about,
            "layers": "all" if case.num_layers is None else case.num_layers,
            "recipe": row.name,
            "attention": "octavo FP8" if has_fp8_attention else f"{attention} BF16",
            "compiled": case.is_compiled,
            "graphs": is_graph,
        }
        ratios = {
            f"{part}_ratio": values[part] / plain[part]
            for part in ("peak_bytes", "weight_bytes")
            if part in values
        }
        record = Measurement(
            op="diffusion_step",
            impl="diffusers" if row.name == BF16 else "octavo",
            case=about,
            values={**values, "speedup": fastest_ms / values["median_ms"], **ratios},
            machine=machine_of(device),
            command=command,
            baseline=", ".join(told),
        )
        records.append(record)
    return records

"""Calibration: a model sees real data in its own dtype, and every layer gets static scales.

Nothing here knows a model: `observe` hooks the place where attention is given q, k and v, and
`forward` runs one batch (octavo.integrations has both for transformers).
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Generic

import torch
from torch import Tensor

from octavo.brief import list_names
from octavo.calibration.autosave import check_scale_paths
from octavo.calibration.data import Prompt, PromptData, batches
from octavo.calibration.observers import (
    CalibrationSettings,
    KeyMeans,
    LayerObserver,
    check_all_ran,
)
from octavo.calibration.scale_file import Kind, LayerScales, ScaleHeader, ScaleSet, save_scales
from octavo.calibration.state import StateFile, state_path
from octavo.errors import ConfigError, UnsupportedError
from octavo.numerics.formats import E4M3
from octavo.numerics.hadamard import hadamard
from octavo.numerics.scales import amax_to_scale

# Called with a layer's name and its q, k and v, [..., heads, head_dim].
See = Callable[[str, Tensor, Tensor, Tensor], None]
Observe = Callable[[See], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """What one layer's q, k or v was, and what its scale does to it.

    amax and scale: the largest of its heads. headroom: how many times larger than the largest seen
    a value may be before it saturates, 448 · scale / amax, the smallest of its heads.
    """

    layer: str
    tensor: str
    amax: float
    scale: float
    headroom: float
    sqnr_db: float
    num_passes: int
    num_nonfinite: int


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """The scales, the statistics behind them and how many prompts were seen."""

    scales: ScaleSet
    statistics: tuple[TensorStatistics, ...]
    num_prompts: int


@dataclass(frozen=True, kw_only=True)
class Subject(Generic[Prompt]):
    """What is calibrated: a model's name and layers, how they are watched, and how it runs.

    dtype: the one it runs in. kind: what the scales are for. is_nonfinite_refused: whether NaN or
    Inf ends the run. uncentered: layers whose keys cannot be centered, with the reason.
    """

    name: str
    dtype: str
    kind: Kind
    layers: Sequence[str]
    observe: Observe
    forward: Callable[[Sequence[Prompt]], object]
    is_nonfinite_refused: bool = False
    uncentered: Mapping[str, str] = field(default_factory=dict)

    def check(self, settings: CalibrationSettings) -> None:
        """Raise if these settings are not for such layers."""
        if self.kind != "kv_cache" and (settings.rotate_keys or settings.center_keys):
            raise ConfigError(
                "expected a KV cache to rotate or center the keys of, got "
                f"{self.kind}: leave rotate_keys and center_keys out"
            )
        if settings.center_keys:
            for name, reason in self.uncentered.items():
                raise UnsupportedError(f"{name}: {reason}")


class Calibration:
    """What all layers have seen so far.

    To center keys takes two passes over the data: the first finds their means, the second what is
    left of them. num_prompts: those of the pass that is under way. layers: the names, as in scale
    files, of those that must be seen. is_nonfinite_refused: whether NaN or Inf is an error.
    """

    def __init__(
        self,
        layers: Sequence[str],
        settings: CalibrationSettings,
        *,
        is_nonfinite_refused: bool = False,
    ) -> None:
        self.settings, self.is_nonfinite_refused = settings, is_nonfinite_refused
        self.layers: dict[str, LayerObserver | None] = dict.fromkeys(layers)
        self.num_prompts = 0
        self.means = KeyMeans(layers) if settings.center_keys else None
        self._rotations: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def is_first_pass(self) -> bool:
        """Whether the means of keys are still to be found."""
        return self.means is not None and not self.means.is_complete

    @property
    def num_seen(self) -> int:
        """Prompts of all passes."""
        return self.num_prompts + (self.means.num_prompts if self.means else 0)

    def see(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """One pass of one layer."""
        if name not in self.layers:
            raise ConfigError(f"expected one of {list_names(list(self.layers))}, got {name}")
        if self.means is not None:
            if not self.means.is_complete:
                self.means.see(name, k)
                return
            k = k.float() - self.means.of(name).to(k.device)
        if self.settings.rotate_keys:
            key = (k.shape[-1], k.device)
            if key not in self._rotations:
                self._rotations[key] = hadamard(k.shape[-1]).to(k.device)
            q, k = (x.float() @ self._rotations[key] for x in (q, k))
        layer = self.layers[name] or LayerObserver.like(q, k, v, self.settings.granularity)
        layer.see(q, k, v)
        for tensor, part in layer.parts.items() if self.is_nonfinite_refused else ():
            if num_bad := int(part.num_nonfinite):  # waits for the device
                raise ConfigError(
                    f"layer {name}: {tensor}: expected finite values, got {num_bad} that are NaN "
                    "or Inf: no scales are saved; run the model in bfloat16 or float32, or look at "
                    "its weights"
                )
        self.layers[name] = layer

    def result(self, header: ScaleHeader | None = None) -> CalibrationResult:
        """Scales for every layer; ConfigError names a layer that saw nothing, or only zeros."""
        if self.is_first_pass:
            raise ConfigError("expected two passes over the data to center keys, got one")
        check_all_ran(self.layers)
        seen = {name: layer for name, layer in self.layers.items() if layer is not None}
        scales, statistics = {}, []
        for name, layer in seen.items():
            found = []
            for tensor, part in layer.parts.items():
                where, limits = f"layer {name}: {tensor}", part.limits(self.settings)
                for what, values in ((where, part.amax), (f"{self.settings} of {where}", limits)):
                    _check_values(what, values, int(part.num_nonfinite))
                scale = amax_to_scale(limits, margin=self.settings.margin)  # [num_groups]
                row = TensorStatistics(
                    layer=name,
                    tensor=tensor,
                    amax=float(part.amax.max()),
                    scale=float(scale.max()),
                    headroom=float((E4M3.max * scale / part.amax).min()),
                    sqnr_db=part.sqnr_db(scale),
                    num_passes=layer.num_passes,
                    num_nonfinite=int(part.num_nonfinite),
                )
                statistics.append(row)
                numbers = tuple(scale.tolist())
                found.append(numbers if len(numbers) > 1 else numbers[0])
            mean = self.means.numbers(name) if self.means else None
            scales[name] = LayerScales(*found, k_mean=mean)
        header = replace(
            header or ScaleHeader(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            observer=str(self.settings),
            passes=min(layer.num_passes for layer in seen.values()),
            margin=self.settings.margin,
            rotate_keys=self.settings.rotate_keys,
        )
        return CalibrationResult(
            scales=ScaleSet(scales, header),
            statistics=tuple(statistics),
            num_prompts=self.num_prompts,
        )


def _check_values(what: str, values: Tensor, num_nonfinite: int) -> None:
    """Refuse zeros of heads: a scale of them would be a guess."""
    if zero := torch.nonzero(values == 0).flatten().tolist():
        heads = f" in heads {list_names([str(h) for h in zero])}" if len(values) > 1 else ""
        others = f" and {num_nonfinite} that were not finite" if num_nonfinite else ""
        raise ConfigError(
            f"{what}: expected values to calibrate on, got only zeros{heads}{others}: no scales "
            "are saved; use other data or another observer, or skip the layer"
        )


def calibrate_to_file(
    subject: Subject[Prompt],
    data: PromptData[Prompt],
    save_path: str | os.PathLike[str],
    settings: CalibrationSettings,
    *,
    num_prompts: int = 100,
    batch_size: int = 1,
    save_every: int = 16,
    is_resumed: bool = True,
    on_prompts: Callable[[int], None] = lambda num_prompts: None,
) -> CalibrationResult:
    """Calibrate on the first prompts of `data` and write the scale file.

    A run that ends too early leaves its state beside the scale file; the next one goes on from it
    if is_resumed. on_prompts: called with the number of prompts so far, of both passes if there are
    two.
    """
    subject.check(settings)
    check_scale_paths(is_fp8=True, save_path=save_path, margin=settings.margin)
    if num_prompts < 1:
        raise ConfigError(f"expected num_prompts from 1 on, got {num_prompts}")
    calibration = Calibration(
        subject.layers, settings, is_nonfinite_refused=subject.is_nonfinite_refused
    )
    state_file = StateFile(
        path=state_path(save_path),
        key=_state_key(subject, data, settings, num_prompts),
        save_every=save_every,
    )
    if not is_resumed:
        state_file.remove()
    elif load_state(calibration, state_file):
        on_prompts(calibration.num_seen)
    if calibration.num_prompts > num_prompts:
        raise ConfigError(
            f"{state_file.path} has seen {calibration.num_prompts} prompts: expected as many or "
            f"more, got {num_prompts}; start afresh"
        )
    calibrate(
        calibration,
        lambda start: batches(data.prompts(num_prompts, start=start), batch_size),
        observe=subject.observe,
        forward=subject.forward,
        state_file=state_file,
        on_batch=on_prompts,
    )
    header = ScaleHeader(kind=subject.kind, model=subject.name[:1000], data=data.name[:1000])
    result = calibration.result(header)
    save_scales(save_path, result.scales)
    state_file.remove()
    return result


def calibrate(
    calibration: Calibration,
    batches_from: Callable[[int], Iterable[Sequence[Prompt]]],
    *,
    observe: Observe,
    forward: Callable[[Sequence[Prompt]], object],
    state_file: StateFile | None = None,
    on_batch: Callable[[int], None] = lambda num_prompts: None,
) -> Calibration:
    """Let a model see the data as often as its settings need: twice to center keys, else once.

    batches_from: called at the start of each pass with how many prompts to leave out. state_file:
    written now and then, between batches; the caller has loaded it. on_batch: called with the
    number of prompts so far. Returns `calibration`, which has seen them.
    """
    while True:
        num_saved = calibration.num_prompts
        with observe(calibration.see), torch.inference_mode():
            for batch in batches_from(calibration.num_prompts):
                forward(batch)
                calibration.num_prompts += len(batch)
                on_batch(calibration.num_seen)
                if state_file and calibration.num_prompts - num_saved >= state_file.save_every:
                    save_state(calibration, state_file)
                    num_saved = calibration.num_prompts
        if calibration.num_prompts == 0:
            raise ConfigError("expected prompts to calibrate on, got none")
        if calibration.means is None or calibration.means.is_complete:
            return calibration
        # From now on, keys are seen without their means.
        calibration.means.complete(calibration.num_prompts)
        calibration.num_prompts = 0
        if state_file is not None:
            save_state(calibration, state_file)


def save_state(calibration: Calibration, state_file: StateFile) -> None:
    """Write what was seen so far."""
    layers = {
        name: None if layer is None else layer.state_dict()
        for name, layer in calibration.layers.items()
    }
    state = {"num_prompts": calibration.num_prompts, "layers": layers}
    if calibration.means is not None:
        state["means"] = dict(vars(calibration.means))
    state_file.save(state)


def load_state(calibration: Calibration, state_file: StateFile) -> bool:
    """Go on where a state file was written; False, and nothing changed, if there is none."""
    state = state_file.load()
    if state is None:
        return False
    if state["layers"].keys() != calibration.layers.keys():
        raise ConfigError(
            f"{state_file.path}: expected the state of {len(calibration.layers)} layers as the "
            f"model has, got {len(state['layers'])} others; start afresh"
        )
    calibration.num_prompts = state["num_prompts"]
    if calibration.means is not None:
        vars(calibration.means).update(state["means"])
    for name, layer in state["layers"].items():
        calibration.layers[name] = None if layer is None else LayerObserver.from_state_dict(layer)
    return True


def _state_key(
    subject: Subject[Any], data: PromptData[Any], settings: CalibrationSettings, num_prompts: int
) -> dict[str, str]:
    key = {
        "model": subject.name,
        "dtype": subject.dtype,
        "data": f"{data.name} ({data.fingerprint})",
        "observer": str(settings),
        "granularity": settings.granularity,
        "margin": f"{settings.margin:g}",
    }
    if settings.rotate_keys:
        key["keys"] = "rotated"
    if settings.center_keys:
        # Means of more prompts would be others, and those that were seen were seen without them.
        key |= {"means": "of keys", "num_prompts": f"{num_prompts}"}
    return key

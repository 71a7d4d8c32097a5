"""Saving the scales of a dynamic run, to be loaded as static ones by the next."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from octavo.atomic import check_target
from octavo.brief import list_names
from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet, save_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.layers.encoder_attention import EncoderAttention
from octavo.layers.scaling import DynamicScaling
from octavo.numerics.amax import HISTORY_LENGTH
from octavo.numerics.granularity import PerHead
from octavo.numerics.scales import check_margin

# Asking the layers how far they are waits for the device; this often, nobody notices.
CHECK_EVERY = HISTORY_LENGTH


def check_scale_paths(
    *,
    is_fp8: bool,
    scale_path: str | os.PathLike[str] | None = None,
    save_path: str | os.PathLike[str] | None = None,
    margin: float = 1.5,
) -> None:
    """Raise ConfigError if what is asked about scale files contradicts itself; touches no model."""
    check_margin(margin)
    if scale_path is not None and save_path is not None:
        raise ConfigError(
            f"expected scales to load or to save, got both ({scale_path} and {save_path}): loaded "
            "scales are static, and only dynamic ones can be saved"
        )
    path = scale_path if scale_path is not None else save_path
    if path is not None and not is_fp8:
        raise ConfigError(f"expected attention in fp8 for scales at {path}, got another dtype")
    if scale_path is not None and not Path(scale_path).is_file():
        raise ConfigError(f"expected a scale file, got none at {scale_path}")
    if save_path is not None:
        check_target(save_path)


class ScaleSaver:
    """Writes a scale file once every layer of a model has seen 16 passes, and not before.

    `step` after each pass of the encoder, or `watch` to have that done for every call of the tower.
    The replay of a CUDA graph is no call: who replays one steps all `savers_of` the tower. Only
    every 16th step asks the device. `close` at the end of the run looks a last time and raises if
    there is still nothing to save. rename: what the scale file calls a layer, from its own name.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        margin: float = 1.5,
        rename: Callable[[str], str] = str,
        header: ScaleHeader | None = None,
    ) -> None:
        check_scale_paths(is_fp8=True, save_path=path, margin=margin)
        self.path, self.margin = Path(path), margin
        self.header = header or ScaleHeader()
        found = [layer for layer in model.modules() if isinstance(layer, EncoderAttention)]
        self._layers = {rename(x.name): _dynamic(x) for x in found if x.scaling is not None}
        if not self._layers:
            raise ConfigError("expected a model with attention in fp8 whose scales can be saved")
        self._tower = _tower(model)
        self._num_steps = 0
        self._is_paused = self.is_saved = False
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def watch(self) -> "ScaleSaver":
        """Step after each call of the module that holds all layers."""
        if self._hook is None and not self.is_saved:
            self._hook = self._tower.register_forward_hook(lambda *_: self.step())
            _WATCHING.setdefault(self._tower, []).append(self)
        return self

    def is_watching(self, module: nn.Module) -> bool:
        """Whether the saver steps after each call of this very module."""
        return self._hook is not None and self._tower is module

    def step(self) -> None:
        """One more pass of the encoder is done, or on its way."""
        if self.is_saved or self._is_paused:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._num_steps += 1
        if self._num_steps % CHECK_EVERY == 0 and not self._not_ready():
            self._save()

    def close(self) -> None:
        """Save if all layers are ready by now; ConfigError names those that are not."""
        self._unwatch()
        if self.is_saved:
            return
        if waiting := self._not_ready():
            raise ConfigError(
                f"no scales were saved to {self.path}: expected {HISTORY_LENGTH} passes of every "
                f"layer, got {list_names(waiting)}; run more requests with images"
            )
        self._save()

    def _not_ready(self) -> list[str]:
        """The layers that have too few passes or have seen nothing but zeros, with the reason."""
        told = [
            torch.stack([s.num_passes, *(x.amax().min() for x in (s.q, s.k, s.v))])
            for s in self._layers.values()
        ]
        waiting = []
        # One wait for the device.
        for name, (num_passes, *amax) in zip(self._layers, torch.stack(told).tolist(), strict=True):
            if num_passes < HISTORY_LENGTH:
                waiting.append(f"{name} ({num_passes:.0f} passes)")
            elif min(amax) == 0:
                waiting.append(f"{name} (only zeros in {'qkv'[amax.index(0)]})")
        return waiting

    def _save(self) -> None:
        self._unwatch()
        scales = {}
        for name, scaling in self._layers.items():
            found = scaling.scales(self.margin)
            numbers: list[Any] = [part.tolist() for part in (found.q, found.k, found.v)]
            scales[name] = LayerScales(*numbers)
        header = replace(
            self.header,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            observer=f"amax of the last {HISTORY_LENGTH} passes",
            passes=min(int(s.num_passes) for s in self._layers.values()),
            margin=self.margin,
        )
        # Ranks have agreed on their scales; one of them writes.
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_scales(self.path, ScaleSet(scales, header))
        self.is_saved = True

    def _unwatch(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            _WATCHING[self._tower].remove(self)


# The savers that watch a module's calls.
_WATCHING: WeakKeyDictionary[nn.Module, list[ScaleSaver]] = WeakKeyDictionary()


def savers_of(tower: nn.Module) -> list[ScaleSaver]:
    """The savers that watch the calls of a tower, or of a module in it."""
    if not any(_WATCHING.values()):
        return []
    return [saver for module in tower.modules() for saver in _WATCHING.get(module, ())]


@contextmanager
def not_counted(tower: nn.Module) -> Iterator[None]:
    """Inside, calls of a tower are no passes: they leave no trace in its histories."""
    savers = savers_of(tower)
    for saver in savers:
        saver._is_paused = True
    try:
        yield
    finally:
        for saver in savers:
            saver._is_paused = False


def _dynamic(layer: EncoderAttention) -> DynamicScaling:
    """The scaling of a layer in FP8, which must be dynamic."""
    scaling = layer.scaling
    if not isinstance(scaling, DynamicScaling):
        raise ConfigError(f"{layer}: expected dynamic scales, which can be saved, got static ones")
    if scaling.group is not None and isinstance(scaling.granularity, PerHead):
        raise UnsupportedError(
            f"{layer}: its heads lie on several ranks: save scales per tensor, or per head on one "
            "rank"
        )
    return scaling


def _tower(model: nn.Module) -> nn.Module:
    """The smallest module that holds all layers and is itself called."""
    # A layer is not its own tower: what holds it is called whichever way it is fused.
    names = [
        name.split(".")[:-1] for name, m in model.named_modules() if isinstance(m, EncoderAttention)
    ]
    shared = os.path.commonprefix(names)
    module = model.get_submodule(".".join(shared))
    while shared and isinstance(module, nn.ModuleList | nn.ModuleDict):
        shared = shared[:-1]
        module = model.get_submodule(".".join(shared))
    return module

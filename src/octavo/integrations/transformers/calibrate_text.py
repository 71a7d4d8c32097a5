"""Static scales for the keys, values and queries of a language model, from texts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration, calibrate
from octavo.calibration.scale_file import ScaleHeader, ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.observe_text import observe_text
from octavo.integrations.transformers.text import find_layers, find_uncentered
from octavo.integrations.transformers.text_model import Window, run_windows


def calibrate_kv(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    settings: CalibrationSettings | None = None,
) -> ScaleSet:
    """Static scales for a language model's KV cache, from batches of its inputs (input_ids, …).

    The model runs in its own dtype, without a cache, and is left as it was. Positions that an
    attention_mask leaves out do not count. `octavo calibrate --kv` does the same with texts and
    chats, prints what was seen and can be resumed. To center keys the batches are gone over twice:
    a list then, no generator.
    """
    settings = settings or CalibrationSettings()
    _check_centered(model, settings)
    if settings.center_keys and isinstance(batches, Iterator):
        raise ConfigError(
            "center_keys needs two passes: expected a list of batches, got a generator"
        )
    calibration = calibrate(
        Calibration(list(find_layers(model)), settings, is_nonfinite_refused=True),
        lambda start: ([inputs] for inputs in batches),
        observe=partial(observe_text, model),
        forward=lambda batch: run_inputs(model, batch[0]),
    )
    return calibration.result(ScaleHeader(kind="kv_cache")).scales


def observe_windows(
    model: nn.Module,
    windows: Sequence[Window],
    settings: CalibrationSettings,
    *,
    on_window: Callable[[int], None] = lambda num_windows: None,
) -> Calibration:
    """What every attention layer saw in these windows; on_window is told how many are done.

    Where keys are centered, windows of both passes count.
    """
    _check_centered(model, settings)
    return calibrate(
        Calibration(list(find_layers(model)), settings),
        lambda start: ([window] for window in windows),
        observe=partial(observe_text, model),
        forward=partial(run_windows, model),
        on_batch=on_window,
    )


def _check_centered(model: nn.Module, settings: CalibrationSettings) -> None:
    if settings.center_keys:
        for name, reason in find_uncentered(model).items():
            raise UnsupportedError(f"{name}: {reason}")


def run_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Run a model on a batch of its inputs, without a cache; padding is cut off."""
    input_ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        raise ConfigError(
            "expected batches with input_ids, a tensor [batch, length], got "
            f"{sorted(inputs) if input_ids is None else type(input_ids).__name__}"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        raise ConfigError(f"expected an attention_mask {list(input_ids.shape)} like the input_ids")
    others = inputs.keys() - {"input_ids", "attention_mask"}
    if not others:
        is_real = torch.ones_like(input_ids) if mask is None else mask
        rows = zip(input_ids, is_real.bool(), strict=True)
        windows = [ids[is_kept].tolist() for ids, is_kept in rows]
        run_windows(model, [window for window in windows if window])
        return
    if mask is not None and not bool(mask.all()):
        raise UnsupportedError(
            f"expected a batch without padding beside {', '.join(sorted(others))}, got padding: "
            "give one prompt at a time"
        )
    device = next(model.parameters()).device
    moved = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in inputs.items()}
    model(**{**moved, "use_cache": False})

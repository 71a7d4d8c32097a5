"""Whether a model's keys and values bear an FP8 cache with scales of 1.0, as vLLM's default is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.calibration.observers import CalibrationSettings, Histogram
from octavo.errors import ConfigError
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers.calibrate_text import observe_windows
from octavo.integrations.transformers.text import as_patterns_see
from octavo.integrations.transformers.text_model import TextModel
from octavo.layers.decoder_attention import DecoderAttention
from octavo.measure.report.tables import Table
from octavo.numerics.formats import Fp8Format, format_named
from octavo.recipe import Recipe

# e4m3 keeps about 31 dB of normal numbers: below this, many have lost their last bits or are zero.
LOW_SQNR_DB = 25.0


@dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """One layer's keys and values at scale 1.0; the largest ones are of the model as it is.

    SQNR is known for e4m3 alone.
    """

    name: str
    index: int
    key_amax: float
    value_amax: float
    keys_saturated: int
    values_saturated: int
    num_nonfinite: int
    key_sqnr_db: float | None
    value_sqnr_db: float | None

    @property
    def is_broken(self) -> bool:
        """Whether a value saturates, or is no number at all."""
        return self.keys_saturated + self.values_saturated + self.num_nonfinite > 0

    @property
    def is_coarse(self) -> bool:
        """Whether values are so small that 1.0 leaves them few bits."""
        known = [db for db in (self.key_sqnr_db, self.value_sqnr_db) if db is not None]
        return any(db < LOW_SQNR_DB for db in known)


@dataclass(frozen=True)
class KvCheck:
    """What a text has shown."""

    model: str
    num_tokens: int
    format: str
    layers: tuple[LayerCheck, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing saturated."""
        return not any(layer.is_broken for layer in self.layers)


def check_kv(text_model: TextModel, windows: Sequence[Tensor], format: str = "e4m3") -> KvCheck:
    """Run a model over windows of a text: as it is, then with an FP8 cache and scales of 1.0."""
    if not windows:
        raise ConfigError("expected one window or more, got none")
    model = text_model.model
    lists = [window.tolist() for window in windows]
    observed = observe_windows(model, lists, CalibrationSettings()).layers
    seen = {name: layer for name, layer in observed.items() if layer is not None}
    apply_(model, Recipe(kv_cache={"format": format, "scaling": "unit"}))
    try:
        with torch.inference_mode():
            for window in windows:
                tokens = window.to(next(model.parameters()).device)[None]
                model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        modules = [m for m in model.modules() if isinstance(m, DecoderAttention)]
        saturated = {module.name: module.saturated.tolist() for module in modules}
    finally:
        restore_(model)
    indices = {layer.name: layer.index or 0 for layer in as_patterns_see(model)}
    layers = []
    for name, observer in seen.items():
        key, value = observer.parts["k"], observer.parts["v"]
        keys_saturated, values_saturated = saturated[name]
        layers.append(
            LayerCheck(
                name=name,
                index=indices[name],
                key_amax=float(key.amax.max()),
                value_amax=float(value.amax.max()),
                keys_saturated=keys_saturated,
                values_saturated=values_saturated,
                num_nonfinite=int(key.num_nonfinite + value.num_nonfinite),
                key_sqnr_db=_sqnr_db(key, format),
                value_sqnr_db=_sqnr_db(value, format),
            )
        )
    num_tokens = sum(len(window) for window in windows)
    return KvCheck(text_model.name, num_tokens, format, tuple(layers))


def _sqnr_db(part: Histogram, format: str) -> float | None:
    return part.sqnr_db(torch.ones_like(part.amax)) if format == "e4m3" else None


def check_table(check: KvCheck) -> Table:
    """Every layer, and what is wrong with it."""
    return Table(
        caption=f"{check.model}: {check.num_tokens} tokens through an FP8 KV cache "
        f"({check.format}) with scales of 1.0",
        header=(
            *("layer", "largest key", "largest value", "keys beyond", "values beyond"),
            *("not finite", "keys (dB)", "values (dB)", "verdict"),
        ),
        rows=tuple(
            (
                layer.name,
                layer.key_amax,
                layer.value_amax,
                layer.keys_saturated,
                layer.values_saturated,
                layer.num_nonfinite,
                layer.key_sqnr_db,
                layer.value_sqnr_db,
                "breaks" if layer.is_broken else "coarse" if layer.is_coarse else "fine",
            )
            for layer in check.layers
        ),
    )


def advice(check: KvCheck, model: str) -> list[str]:
    """What the table means, and what to do."""
    limit = _format(check).max
    largest = max(max(layer.key_amax, layer.value_amax) for layer in check.layers)
    broken = [str(layer.index) for layer in check.layers if layer.is_broken]
    coarse = [str(layer.index) for layer in check.layers if layer.is_coarse and not layer.is_broken]
    lines = []
    if broken:
        lines.append(
            f"Scales of 1.0 break layers {' '.join(broken)}: what lies beyond {limit:g} is cut "
            f"off. Calibrate (octavo calibrate {model} --kv --data TEXT), or give every token its "
            'own scale (granularity "token"), or leave these layers as they are '
            f"(--kv-cache-dtype-skip-layers {' '.join(broken)})."
        )
    if any(layer.num_nonfinite for layer in check.layers):
        lines.append("Values that are not finite come from the model itself: no scale mends them.")
    if coarse:
        lines.append(
            f"Layers {' '.join(coarse)} have values so small that scales of 1.0 leave them few "
            f"bits (below {LOW_SQNR_DB:g} dB): calibrate them."
        )
    if not broken:
        lines.append(
            f"Nothing saturates on these {check.num_tokens} tokens: the largest value is "
            f"{largest:.4g}, {limit / largest if largest else float('inf'):.3g} times below the "
            "limit. Another text may have larger ones."
        )
    lines.append("Decoding keeps queries as they are; prefill quantizes them (q_scale).")
    return lines


def _format(check: KvCheck) -> Fp8Format:
    return format_named(check.format)

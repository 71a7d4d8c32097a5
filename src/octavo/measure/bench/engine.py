"""One model, kept, in engines of one recipe after the other: what benchmarks of the engine share.

Rows are those of `octavo.measure.rows`. Scales of FP8 caches come from the checkpoint; for random
weights they are calibrated here, on random tokens.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.calibration.observers import CalibrationSettings
from octavo.errors import ConfigError
from octavo.integrations.transformers.calibrate_text import calibrate_kv
from octavo.integrations.transformers.decoder import about_decoder, make_decoder
from octavo.integrations.transformers.engine_model import max_context
from octavo.integrations.transformers.text_model import load_text_model
from octavo.layers.linear import Fp8Linear
from octavo.measure.bench.timing import machine_of
from octavo.measure.records import Machine, Scalar
from octavo.measure.rows import ENGINE, Row, parse_rows
from octavo.recipe import Recipe
from octavo.serving.engine.engine import Engine, load_engine
from octavo.serving.engine.settings import EngineSettings

# Random tokens that scales are calibrated on, where the weights are random as well.
CALIBRATION_LEN = 1024


@dataclass(frozen=True)
class Subject:
    """The model that all rows run, and what records say of it."""

    model: Any
    about: dict[str, Scalar]
    is_random: bool

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(iter(self.model.parameters())).device  # type: ignore[no-any-return]

    def machine(self) -> Machine:
        """What records say of the machine it is on."""
        return machine_of(self.device)

    @property
    def max_context(self) -> int | None:
        """How many tokens the model was made for; None if its config does not say."""
        return max_context(self.model, self.model.config.get_text_config())

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return int(self.model.config.get_text_config().vocab_size)


def open_subject(
    name: str | None, config: str | None, *, dtype: str, device: str, layers: int | None
) -> Subject:
    """A model by folder or hub name, or one of random weights by the name of its sizes."""
    if (name is None) == (config is None):
        raise ConfigError(f"expected a model or a config, got {name} and {config}")
    if config is None:
        if layers is not None:
            raise ConfigError("a number of layers is for random weights: leave it out, or --config")
        loaded = load_text_model(name, dtype=dtype, device=device, prompts=None)
        return Subject(loaded.model, _about(loaded.name, loaded.model), False)
    own = "bfloat16" if dtype == "auto" else dtype
    if own not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"expected auto, bfloat16, float16 or float32, got {dtype!r}")
    model = make_decoder(config, torch.device(device), layers, getattr(torch, own))
    return Subject(model, {**_about(config, model), **about_decoder(model)}, True)


def _about(name: str, model: Any) -> dict[str, Scalar]:
    dtype = str(model.dtype).removeprefix("torch.")
    return {"model": name, "dtype": dtype, "weight_bytes": weight_bytes(model)}


def weight_bytes(model: Any) -> int:
    """What a step reads of the weights; of an embedding, that is a row at most."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding
    total = sum(p.nbytes for p in model.parameters()) - (0 if is_tied else embedding.nbytes)
    fp8 = [part for part in model.modules() if isinstance(part, Fp8Linear)]
    return int(total + sum(part.weight.nbytes + part.weight_scale.nbytes for part in fp8))


def check_rows(names: Sequence[str], skip_layers: Sequence[str] = ()) -> list[Row]:
    """The rows of these names, without scales; ConfigError for others, before a model is loaded.

    skip_layers: of every row in FP8, beside its own.
    """
    rows = parse_rows(names, ENGINE)
    if skip_layers and all(row.kv_cache is None for row in rows):
        raise ConfigError("layers to skip are for rows in FP8, got none: --kv-cache-dtype fp8")
    return [row.skipping(skip_layers) for row in rows]


def make_rows(
    names: Sequence[str], subject: Subject, *, skip_layers: Sequence[str] = ()
) -> list[Row]:
    """The rows of these names, with scales for this model where it has random weights."""
    rows = check_rows(names, skip_layers)
    if not subject.is_random or not any(map(_has_unknown_scales, rows)):
        return rows
    scales = _calibrate(subject)
    return [_with_scales(row, scales) if _has_unknown_scales(row) else row for row in rows]


def _has_unknown_scales(row: Row) -> bool:
    settings = row.kv_cache
    return row.needs_scales or (settings is not None and settings.scaling == "checkpoint")


def _with_scales(row: Row, scales: dict[str, Any]) -> Row:
    static = {**dict(row.kv_cache or {}), "scaling": "static"}
    return replace(row, fields={**row.fields, "kv_cache": static, "scales": scales})


def _calibrate(subject: Subject) -> dict[str, Any]:
    """Scales of random tokens, which are what random weights get to see here."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, subject.vocab_size, (1, CALIBRATION_LEN), generator=generator)
    settings = CalibrationSettings(granularity="head", margin=1.5)
    scales = calibrate_kv(subject.model, [{"input_ids": ids.to(subject.device)}], settings)
    return scales.to_dict()


def row_about(row: Row) -> dict[str, Scalar]:
    """What records say of a row."""
    settings = row.kv_cache
    found: dict[str, Scalar] = {"row": row.name}
    if row.linear is not None:
        found["linear"] = str(row.linear)
    if row.prefill_impl is not None:
        found["prefill_impl"] = row.prefill_impl
    if row.digest is not None:
        found["recipe_digest"] = row.digest
    if settings is None:
        return {**found, "kv_cache_dtype": "auto"}
    found["kv_cache_dtype"] = f"fp8_{settings.format}"
    found |= {"granularity": settings.granularity, "scaling": settings.scaling}
    if skipped := row.fields.get("skip_layers"):
        found["skip_layers"] = ",".join(skipped)
    return found


@contextmanager
def open_engine(subject: Subject, row: Row, settings: EngineSettings) -> Iterator[Engine]:
    """An engine that has the model for this row; afterwards its memory is free for the next."""
    recipe = row.recipe() or Recipe()
    engine = load_engine(subject.model, recipe, settings, prefill_impl=row.prefill_impl)
    try:
        yield engine
    finally:
        engine.close()
        while engine.has_work:  # the last words of requests that were open
            engine.step()
        del engine
        gc.collect()
        if subject.device.type == "cuda":
            torch.cuda.empty_cache()


def engine_about(engine: Engine) -> dict[str, Scalar]:
    """What a record says of an engine."""
    settings = engine.settings
    names = ("page_size", "max_num_batched_tokens", "compile")
    about: dict[str, Scalar] = {name: getattr(settings, name) for name in names}
    about["cuda_graphs"] = engine.has_graphs  # what runs, not what was asked for
    about["weight_bytes"] = weight_bytes(engine.model)
    return {**about, "num_pages": engine.stats().num_pages}

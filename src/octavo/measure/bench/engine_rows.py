"""The rows of a benchmark of the engine: one model, kept, under one recipe after the other.

    DTYPE[+head|+token][+unit][+linear][+skip=PATTERN]…[+prefill=IMPL]

DTYPE is one of `DTYPES`, or the .json or .toml file of a recipe, which takes +skip and +prefill
alone. Scales of FP8 rows are per tensor unless the name says per head or per token, and come from
the checkpoint; for random weights they are calibrated here, on random tokens. unit takes 1.0.
linear: linear layers in FP8 as well, per channel and token. prefill: attention of prompts by this
implementation, such as a peer's (`peer_impls`).
"""

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from octavo.calibration.observers import CalibrationSettings
from octavo.errors import ConfigError
from octavo.integrations.transformers.calibrate_text import calibrate_kv
from octavo.integrations.transformers.decoder import about_decoder, make_decoder
from octavo.integrations.transformers.engine_model import max_context
from octavo.integrations.transformers.text_model import load_text_model
from octavo.kernels.device import describe
from octavo.layers.linear import Fp8Linear
from octavo.measure.records import Machine, Scalar
from octavo.recipe import Recipe
from octavo.serving.engine.engine import Engine, load_engine
from octavo.serving.engine.settings import EngineSettings

FORMATS = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
PLAIN = "auto"
DTYPES = (PLAIN, *FORMATS)
GRANULARITIES = ("head", "token")
SKIP, PREFILL = "+skip=", "+prefill="
RECIPE_FILES = (".json", ".toml")
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
        described = describe(self.device)
        return Machine.current(gpu=described.gpu, capability=described.capability)

    @property
    def max_context(self) -> int | None:
        """How many tokens the model was made for; None if its config does not say."""
        return max_context(self.model, self.model.config.get_text_config())

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return int(self.model.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class EngineRow:
    """A recipe by the name that was asked for; prefill_impl: of attention of prompts, by name.

    digest: of the file that the recipe came from, if it did.
    """

    name: str
    recipe: Recipe
    prefill_impl: str | None = None
    digest: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are stored as they are."""
        return self.recipe.kv_cache is None

    @property
    def about(self) -> dict[str, Scalar]:
        """What records say of it."""
        settings = self.recipe.kv_cache
        found: dict[str, Scalar] = {"row": self.name}
        if self.recipe.linear is not None:
            found["linear"] = str(self.recipe.linear)
        if self.prefill_impl is not None:
            found["prefill_impl"] = self.prefill_impl
        if self.digest is not None:
            found["recipe_digest"] = self.digest
        if settings is None:
            return {**found, "kv_cache_dtype": PLAIN}
        found["kv_cache_dtype"] = f"fp8_{settings.format}"
        found |= {"granularity": settings.granularity, "scaling": settings.scaling}
        if self.recipe.skip_layers:
            found["skip_layers"] = ",".join(self.recipe.skip_layers)
        return found


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


def make_rows(
    names: Sequence[str], subject: Subject, *, skip_layers: Sequence[str] = ()
) -> list[EngineRow]:
    """The rows of these names; skip_layers: of every row in FP8, beside its own."""
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"expected different rows, got {list(names)}")
    rows = [_parse(name, skip_layers) for name in names]
    if skip_layers and all(row.is_plain for row in rows):
        raise ConfigError("layers to skip are for rows in FP8, got none: --kv-cache-dtype fp8")
    if not subject.is_random or not any(map(_has_checkpoint_scales, rows)):
        return rows
    scales = _calibrate(subject)
    return [_with_scales(row, scales) if _has_checkpoint_scales(row) else row for row in rows]


def check_rows(names: Sequence[str], skip_layers: Sequence[str] = ()) -> list[EngineRow]:
    """The rows of these names, without scales; ConfigError for others, before a model is loaded."""
    return [_parse(name, skip_layers) for name in names]


def _has_checkpoint_scales(row: EngineRow) -> bool:
    settings = row.recipe.kv_cache
    return settings is not None and settings.scaling == "checkpoint"


def _with_scales(row: EngineRow, scales: dict[str, Any]) -> EngineRow:
    settings = dict(row.recipe.kv_cache or {})
    changed = row.recipe.replace(kv_cache={**settings, "scaling": "static"}, scales=scales)
    return replace(row, recipe=changed)


def _parse(text: str, skip_layers: Sequence[str]) -> EngineRow:
    whole, _, prefill_impl = text.partition(PREFILL)
    if PREFILL in text and not prefill_impl:
        raise ConfigError(f"expected the name of an implementation after {PREFILL}, got {text!r}")
    recipe = _parse_recipe(whole, skip_layers)
    file = whole.split(SKIP)[0]
    digest = None
    if file.endswith(RECIPE_FILES):
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return EngineRow(text, recipe, prefill_impl or None, digest)


def _parse_recipe(text: str, skip_layers: Sequence[str]) -> Recipe:
    front, *skipped = text.split(SKIP)
    if front.endswith(RECIPE_FILES):
        recipe = Recipe.load(front)
        if recipe.kv_cache is None and skipped:
            raise ConfigError(f"{text}: layers to skip are for a recipe with a kv_cache, got none")
        more = [] if recipe.kv_cache is None else [*skipped, *skip_layers]
        return recipe.replace(skip_layers=[*recipe.skip_layers, *more])
    dtype, *words = front.split("+")
    linear = "fp8" if "linear" in words else None
    if linear is not None:
        words.remove("linear")
    if dtype == PLAIN and not words and not skipped:
        return Recipe(linear=linear)
    skipped += skip_layers
    granularity = [word for word in words if word in GRANULARITIES]
    others = [word for word in words if word not in GRANULARITIES]
    is_known = others in ([], ["unit"]) and granularity in ([], ["head"], ["token"])
    if dtype not in FORMATS or not is_known or (others and granularity == ["token"]):
        raise ConfigError(
            f"expected {PLAIN}, or {', '.join(FORMATS)} with +head or +token, +unit, {SKIP}PATTERN "
            f"after it, +linear with any of them, or a recipe's file, and {PREFILL}IMPL after all; "
            f"got {text!r}"
        )
    settings: dict[str, Any] = {
        "format": FORMATS[dtype],
        "granularity": (granularity or ["tensor"])[0],
    }
    if others:
        settings["scaling"] = "unit"
    return Recipe(kv_cache=settings, skip_layers=skipped, linear=linear)


def _calibrate(subject: Subject) -> dict[str, Any]:
    """Scales of random tokens, which are what random weights get to see here."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, subject.vocab_size, (1, CALIBRATION_LEN), generator=generator)
    settings = CalibrationSettings(granularity="head", margin=1.5)
    scales = calibrate_kv(subject.model, [{"input_ids": ids.to(subject.device)}], settings)
    return scales.to_dict()


@contextmanager
def open_engine(subject: Subject, row: EngineRow, settings: EngineSettings) -> Iterator[Engine]:
    """An engine that has the model for this row; afterwards its memory is free for the next."""
    engine = load_engine(subject.model, row.recipe, settings, prefill_impl=row.prefill_impl)
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

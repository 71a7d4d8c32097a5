"""What a model is made of, by name or from its config: a decoder, a vision tower, a DiT's step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import install_command, need
from octavo.measure.advise.model_names import known_name, near_names, other_sizes

if TYPE_CHECKING:
    from octavo.integrations.diffusers.step_work import StepWork
    from octavo.integrations.transformers.language_work import DecoderWork, LanguageWork
    from octavo.integrations.transformers.tower_work import TowerWork

CONFIG_FILES = ("config.json", "model_index.json")


@dataclass(frozen=True)
class ModelShape:
    """A model's parts, those that it has; name: what records call it.

    quantized: how the weights of its checkpoint are quantized already; None if they are not.
    unknown_tower: why nothing can be said of the vision tower that it has. refused: why
    `octavo serve` does not run it, uncached: why no FP8 cache can be had; None if they can. other:
    a language model without a decoder of the kind that times are computed from. note: what else to
    know of the name that it was found by.
    """

    name: str
    decoder: "DecoderWork | None" = None
    tower: "TowerWork | None" = None
    step: "StepWork | None" = None
    quantized: str | None = None
    unknown_tower: str | None = None
    refused: str | None = None
    uncached: str | None = None
    other: "LanguageWork | None" = None
    note: str | None = None

    @property
    def parts(self) -> str:
        """What it has, in words."""
        names = {
            "a language model": self.decoder or self.other,
            "a vision tower": self.tower,
            "a diffusion transformer": self.step,
        }
        return " and ".join(name for name, part in names.items() if part is not None)


# How the checkpoints of a name are quantized, if they are.
QUANTIZED = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4"}


def known_models() -> list[str]:
    """Every name that `named_model` takes; `find_model` takes others for the same models."""
    from octavo.integrations.transformers import decoder, language_work, vision_tower

    names = [*decoder.CONFIGS, *language_work.LANGUAGE_MODELS, *vision_tower.CONFIGS]
    return list(dict.fromkeys([*names, *_diffusion_names()]))


def _diffusion_names() -> Sequence[str]:
    from importlib.util import find_spec

    if find_spec("diffusers") is None:
        return ()
    from octavo.integrations.diffusers.full_size import FULL_SIZES

    return tuple(FULL_SIZES)


def find_model(name: str) -> ModelShape:
    """The shape of a folder of transformers or diffusers, of a GGUF file, or of a name.

    Names are those of `known_models` and of `model_names`: on the hub, and of families. Nothing is
    downloaded.
    """
    if _has_config(Path(name)):
        return _read_folder(Path(name))
    names = known_models()
    if (known := known_name(name, names)) is not None:
        others = other_sizes(name, names)
        note = f"{name} is taken as {known}; octavo also knows {', '.join(others)}."
        return replace(named_model(known), note=note if others else None)
    if Path(name).exists():
        return _read_folder(Path(name))
    near = near_names(name, names)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"expected a model's folder or GGUF file, or a name of {', '.join(names)}; "
        f"got {name!r}.{hint}{_missing_names()}"
    )


def _has_config(path: Path) -> bool:
    files = (path / file for file in CONFIG_FILES)
    return path.is_file() or any(file.is_file() for file in files) or any(path.glob("*.gguf"))


def named_model(name: str) -> ModelShape:
    """The shape of a name of `known_models`."""
    from octavo.integrations.transformers import decoder, language_work, tower_work, vision_tower

    has_decoder = name in decoder.CONFIGS or name in language_work.LANGUAGE_MODELS
    has_tower = name in vision_tower.CONFIGS and name not in decoder.CONFIGS
    if has_decoder or has_tower:
        return ModelShape(
            name,
            decoder=language_work.named_decoder(name) if has_decoder else None,
            tower=tower_work.named_tower(name) if has_tower else None,
            quantized=QUANTIZED.get(name),
        )
    if name in _diffusion_names():
        from octavo.integrations.diffusers.step_work import named_step

        return _step_shape(name, named_step(name))
    raise ConfigError(f"expected a model of {', '.join(known_models())}; got {name!r}")


def _step_shape(name: str, step: "StepWork") -> ModelShape:
    video = "it makes videos, and octavo serve --omni serves pictures"
    return ModelShape(name, step=step, refused=video if step.makes_video else None)


def _missing_names() -> str:
    if _diffusion_names():
        return ""
    return f" Names of diffusion models need diffusers: {install_command('diffusers')}"


def _read_folder(folder: Path) -> ModelShape:
    import json

    name = folder.resolve().name
    if (folder / "model_index.json").is_file():
        return _read_diffusion(folder, name)
    from octavo.integrations.transformers.gguf_file import find_gguf

    if (gguf := find_gguf(str(folder))) is not None:
        return _read_transformers(gguf, gguf.stem)
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: expected a config.json, got: {error}") from None
    if isinstance(config, dict) and "_class_name" in config:
        return _read_diffusion(file.parent, name)
    return _read_transformers(file.parent, name)


def _read_diffusion(folder: Path, name: str) -> ModelShape:
    need(str(folder), "diffusers")
    from octavo.integrations.diffusers.step_work import step_of_folder

    return _step_shape(name, step_of_folder(folder))


def _read_transformers(folder: Path, name: str) -> ModelShape:
    from octavo.integrations.transformers.language_work import (
        language_of_config,
        read_config,
    )
    from octavo.integrations.transformers.load_stored import quantization_method
    from octavo.integrations.transformers.tower_work import tower_of_config

    config: Any = read_config(folder)
    try:
        language = language_of_config(config)
    except ValueError as error:
        raise CheckpointError(
            f"{folder}: expected the config of a language model, got {brief(str(error))}"
        ) from error
    shape = ModelShape(
        name,
        language.decoder,
        quantized=quantization_method(str(folder)),
        refused=language.refused,
        uncached=language.uncached,
        other=language if language.decoder is None else None,
    )
    if (vision := getattr(config, "vision_config", None)) is None:
        return shape
    if language.refused is None and not language.reads_images:
        return replace(shape, unknown_tower="octavo serve reads no images for such a model")
    try:
        return replace(shape, tower=tower_of_config(vision))
    except UnsupportedError as error:
        return replace(shape, unknown_tower=str(error))

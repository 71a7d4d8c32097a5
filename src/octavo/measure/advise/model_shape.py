"""What a model is made of, by name or from its config: a decoder, a vision tower, a DiT's step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import install_command, need

if TYPE_CHECKING:
    from octavo.integrations.diffusers.step_work import StepWork
    from octavo.integrations.transformers.language_work import DecoderWork
    from octavo.integrations.transformers.tower_work import TowerWork


@dataclass(frozen=True)
class ModelShape:
    """A model's parts, those that it has; name: what records call it.

    quantized: how the weights of its checkpoint are quantized already; None if they are not.
    unknown_tower: why nothing can be said of the vision tower that it has.
    """

    name: str
    decoder: "DecoderWork | None" = None
    tower: "TowerWork | None" = None
    step: "StepWork | None" = None
    quantized: str | None = None
    unknown_tower: str | None = None

    @property
    def parts(self) -> str:
        """What it has, in words."""
        names = {
            "a language model": self.decoder,
            "a vision tower": self.tower,
            "a diffusion transformer": self.step,
        }
        return " and ".join(name for name, part in names.items() if part is not None)


# Names that the models themselves have, for the sizes that records call otherwise.
ALIASES = {"flux.1": "flux.1-dev"}


def known_models() -> list[str]:
    """Every name that `find_model` takes, but for aliases."""
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
    """The shape of a name, a folder of transformers or diffusers, or a GGUF file."""
    from octavo.integrations.transformers import decoder, language_work, tower_work, vision_tower

    wanted = ALIASES.get(name.lower(), name.lower())
    has_decoder = wanted in decoder.CONFIGS or wanted in language_work.LANGUAGE_MODELS
    has_tower = wanted in vision_tower.CONFIGS and wanted not in decoder.CONFIGS
    if has_decoder or has_tower:
        return ModelShape(
            wanted,
            decoder=language_work.named_decoder(wanted) if has_decoder else None,
            tower=tower_work.named_tower(wanted) if has_tower else None,
        )
    if Path(name).exists():
        return _read_folder(Path(name))
    if wanted in _diffusion_names():
        from octavo.integrations.diffusers.step_work import named_step

        return ModelShape(wanted, step=named_step(wanted))
    raise ConfigError(
        f"expected a model's folder or GGUF file, or a name of {', '.join(known_models())}; "
        f"got {name!r}{_missing_names()}"
    )


def _missing_names() -> str:
    if _diffusion_names():
        return ""
    return f"; names of diffusion models need diffusers: {install_command('diffusers')}"


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

    return ModelShape(name, step=step_of_folder(folder))


def _read_transformers(folder: Path, name: str) -> ModelShape:
    from octavo.integrations.transformers.language_work import (
        decoder_of_config,
        read_config,
    )
    from octavo.integrations.transformers.load_stored import quantization_method
    from octavo.integrations.transformers.tower_work import tower_of_config

    config: Any = read_config(folder)
    vision, method = getattr(config, "vision_config", None), quantization_method(str(folder))
    try:
        language = decoder_of_config(config)
    except ValueError as error:
        raise CheckpointError(
            f"{folder}: expected the config of a language model, got {brief(str(error))}"
        ) from error
    if vision is None:
        return ModelShape(name, language, quantized=method)
    try:
        return ModelShape(name, language, tower_of_config(vision), quantized=method)
    except UnsupportedError as error:
        return ModelShape(name, language, quantized=method, unknown_tower=str(error))

"""What a model is made of, by name or from its config, and what it will be used for.

Parts are a decoder, a vision tower, and a diffusion transformer's step. Names are octavo's own,
those on the hub, and short ones of families.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import install_command, need
from octavo.measure.bench.cases import RESOLUTIONS

if TYPE_CHECKING:
    from octavo.integrations.diffusers.full_size import StepWork
    from octavo.integrations.transformers.model_work import DecoderWork, LanguageWork, TowerWork


# Our name: repositories on the hub with a model of these sizes. The list is not all there are.
HUB_NAMES: Mapping[str, Sequence[str]] = {
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "qwen3-vl-8b": ("Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-8B-Thinking"),
    "qwen3-vl-30b-a3b": ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Thinking"),
    "flux.1-dev": ("black-forest-labs/FLUX.1-dev",),
    "qwen-image": ("Qwen/Qwen-Image",),
    "wan2.2-14b": ("Wan-AI/Wan2.2-T2V-A14B-Diffusers",),
}
# Names of families, and the size that is meant.
SHORT_NAMES: Mapping[str, str] = {
    "llama-3.1": "llama-3.1-8b",
    "gpt-oss": "gpt-oss-20b",
    "gemma-3": "gemma-3-4b",
    "qwen3-vl": "qwen3-vl-8b",
    "flux.1": "flux.1-dev",
    "wan2.2": "wan2.2-14b",
}


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """Up to three known names that are spelt like this one, as one would write them."""
    spellings = _spellings(known)
    shown = {hub.lower(): hub for hubs in HUB_NAMES.values() for hub in hubs}
    words = dict.fromkeys([name.lower(), name.lower().rpartition("/")[2]])
    close = [near for word in words for near in get_close_matches(word, spellings, 3, 0.7)]
    return list(dict.fromkeys(shown.get(near, spellings[near]) for near in close))[:3]


def _spellings(known: Sequence[str]) -> dict[str, str]:
    """Every way to write a known name, in lower case: our name."""
    found = {name: name for name in known}
    for name in known:
        for hub in HUB_NAMES.get(name, ()):
            found |= {hub.lower(): name, hub.lower().rpartition("/")[2]: name}
    return found


@dataclass(frozen=True)
class ModelShape:
    """A model's parts, those that it has; name: what records call it.

    quantized: how the weights of its checkpoint are quantized already. unknown_tower: why nothing
    can be said of its vision tower. refused: why `octavo serve` does not run it. uncached: why it
    has no FP8 cache. other: a language model whose times cannot be computed. note: what else to
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
    from octavo.integrations.transformers import decoder, vision_tower

    names = [*decoder.CONFIGS, *decoder.LANGUAGE_MODELS, *vision_tower.CONFIGS]
    return list(dict.fromkeys([*names, *_diffusion_names()]))


def _diffusion_names() -> Sequence[str]:
    from importlib.util import find_spec

    if find_spec("diffusers") is None:
        return ()
    from octavo.integrations.diffusers.full_size import FULL_SIZES

    return tuple(FULL_SIZES)


def find_model(name: str) -> ModelShape:
    """The shape of a folder of transformers or diffusers, of a GGUF file, or of a name.

    Names are those of `known_models`, on the hub (`HUB_NAMES`), and of families (`SHORT_NAMES`).
    Nothing is downloaded.
    """
    path = Path(name)
    files = [path, path / "config.json", path / "model_index.json", *path.glob("*.gguf")]
    if any(file.is_file() for file in files):
        return _read_folder(path)
    names = known_models()
    wanted = name.lower()
    known = {**_spellings(names), **SHORT_NAMES}.get(wanted)
    if known in names:
        # Of a family's name: the other sizes that were not chosen.
        others = [n for n in names if n.startswith(f"{wanted}-") and n != known]
        note = f"{name} is taken as {known}; octavo also knows {', '.join(others)}."
        return replace(named_model(known), note=note if others and wanted in SHORT_NAMES else None)
    if path.exists():
        return _read_folder(path)
    near = near_names(name, names)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    if not _diffusion_names():
        hint += f" Names of diffusion models need diffusers: {install_command('diffusers')}"
    raise ConfigError(
        f"expected a model's folder or GGUF file, or a name of {', '.join(names)}; "
        f"got {name!r}.{hint}"
    )


def named_model(name: str) -> ModelShape:
    """The shape of a name of `known_models`."""
    from octavo.integrations.transformers import decoder, model_work, vision_tower

    has_decoder = name in decoder.CONFIGS or name in decoder.LANGUAGE_MODELS
    has_tower = name in vision_tower.CONFIGS and name not in decoder.CONFIGS
    if has_decoder or has_tower:
        return ModelShape(
            name,
            decoder=model_work.named_decoder(name) if has_decoder else None,
            tower=model_work.named_tower(name) if has_tower else None,
            quantized=QUANTIZED.get(name),
        )
    if name in _diffusion_names():
        from octavo.integrations.diffusers.full_size import named_step

        return _step_shape(name, named_step(name))
    raise ConfigError(f"expected a model of {', '.join(known_models())}; got {name!r}")


def _step_shape(name: str, step: "StepWork") -> ModelShape:
    video = "it makes videos, and octavo serve --omni serves pictures"
    return ModelShape(name, step=step, refused=video if step.makes_video else None)


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
    from octavo.integrations.diffusers.full_size import step_of_folder

    return _step_shape(name, step_of_folder(folder))


def _read_transformers(folder: Path, name: str) -> ModelShape:
    from octavo.integrations.transformers.load import load_config, quantization_method
    from octavo.integrations.transformers.model_work import language_of_config, tower_of_config

    config: Any = load_config(str(folder))
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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests, how many of them at once, and their images.

    Attributes:
        context: Tokens of a prompt.
        concurrency: Requests that run at once.
        output_len: Tokens of an answer.
        image_size: Height and width of an image.
        num_images: Images in one request.
    """

    context: int = 8192
    concurrency: int = 1
    output_len: int = 512
    image_size: tuple[int, int] = (1080, 1920)
    num_images: int = 1

    def __post_init__(self) -> None:
        counts = (self.context, self.concurrency, self.output_len, self.num_images)
        if min(*counts, *self.image_size) < 1:
            raise ConfigError(f"expected sizes and counts of at least 1, got {self}")

    @property
    def length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.context + self.output_len

    @property
    def middle(self) -> int:
        """Tokens of a sequence in the middle of its answer."""
        return self.context + self.output_len // 2


def parse_size(text: str) -> tuple[int, int]:
    """Height and width of "1920x1080", which is width and height, or of hd, fullhd, qhd, 4k."""
    if (named := RESOLUTIONS.get(text.strip().lower())) is not None:
        return named
    found = re.fullmatch(r"([0-9]+)x([0-9]+)", text.strip().lower())
    if found is None:
        raise ConfigError(
            f"expected an image size such as 1920x1080, or {', '.join(RESOLUTIONS)}; got {text!r}"
        )
    return int(found[2]), int(found[1])

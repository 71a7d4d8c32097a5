"""Flags of commands that run a pipeline of diffusers; names are vllm-omni's where it has them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.errors import ConfigError

Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        help="Of the transformer's linear layers: fp8. Modulation, embeddings and the first and "
        "last projection stay as they are.",
        show_default=False,
    ),
]
IgnoredLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--ignored-layers",
        help="Linear layers that --quantization leaves as they are: a part of a name (img_mlp), a "
        "glob, re:…, a block's number or range; may be given more than once.",
        show_default=False,
    ),
]
WeightOnlyLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--weight-only-layers",
        help="Linear layers of which --quantization changes the weight alone; modulation is all of "
        "that kind, which else stay as they are. May be given more than once.",
        show_default=False,
    ),
]
QuantizationConfig = Annotated[
    str | None,
    typer.Option(
        "--quantization-config",
        help="JSON in place of --quantization: {method: fp8, weight_block_size: [128, 128], …}, or "
        "one of those for each component: {transformer: …, text_encoder: …, vae: null}.",
        show_default=False,
    ),
]
Attention = Annotated[
    str | None,
    typer.Option("--attention", help="Of the transformer: fp8.", show_default=False),
]
ScalePath = Annotated[
    Path | None,
    typer.Option(
        "--scale-path",
        help="Static scales of activations for --quantization fp8, from this file.",
        show_default=False,
    ),
]
RecipePath = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        help="A recipe (.toml or .json) in place of the flags above.",
        show_default=False,
    ),
]
CacheBackend = Annotated[
    str | None,
    typer.Option(
        "--cache-backend",
        help="tea_cache or first_block_cache: steps that change little are not computed.",
        show_default=False,
    ),
]
CacheConfig = Annotated[
    str | None,
    typer.Option(
        "--cache-config",
        help="Its settings as JSON, such as '{\"rel_l1_thresh\": 0.2}'.",
        show_default=False,
    ),
]


def read_object(flag: str, text: str | None) -> dict[str, Any] | None:
    """The JSON object of a flag."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: expected a JSON object, got {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag}: expected a JSON object, got {text[:100]}")
    return found


def quantization_words(
    recipe_path: Path | None,
    quantization: str | None,
    patterns: Mapping[str, Sequence[str] | None],
    config: str | None,
    attention: str | None,
    scale_path: Path | None,
) -> dict[str, Any]:
    """What the flags say is quantized, as arguments of `octavo.Omni`; patterns: by field."""
    from octavo.recipe import Recipe

    flags = (quantization, config, attention, scale_path)
    given = {name: list(texts) for name, texts in patterns.items() if texts}
    if recipe_path is not None:
        if given or any(flag is not None for flag in flags):
            raise ConfigError("expected --recipe or the flags that fill one, got both")
        return {"recipe": Recipe.load(recipe_path)}
    if quantization not in (None, "fp8"):
        raise ConfigError(f"expected --quantization fp8, or none; got {quantization!r}")
    if quantization is None and (given or scale_path is not None):
        flag = f"--{next(iter(given), 'scale_path').replace('_', '-')}"
        raise ConfigError(f"{flag} needs --quantization fp8, got none")
    if quantization is not None and config is not None:
        raise ConfigError("expected --quantization or --quantization-config, got both")
    words: dict[str, Any] | None = read_object("--quantization-config", config)
    if quantization is not None:
        words = {"method": "fp8", **given}
    if words is not None and scale_path is not None:
        words["activation_scheme"] = "static"
    scales = None if scale_path is None else str(scale_path)
    return {"quantization_config": words, "attention": attention, "scales": scales}

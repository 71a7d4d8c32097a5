"""What commands are asked to quantize; names are vLLM's and vllm-omni's where they have them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import read_object
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Which linear layers are quantized, or a recipe that says so.

    Attributes:
        quantization: Of linear layers: fp8, a scale for each output of a weight and for each token.
        ignored_layers: Linear layers that --quantization leaves as they are: a part of a name
            (down_proj), a glob, re:…, a layer's number or range; may be given more than once.
        weight_only_layers: Linear layers of which --quantization changes the weight alone; with
            --omni, modulation is all of that kind. May be given more than once.
        recipe_path: A recipe (.toml or .json) in place of the flags that fill one.
    """

    quantization: str | None = None
    ignored_layers: tuple[str, ...] = ()
    weight_only_layers: tuple[str, ...] = ()
    recipe_path: Annotated[Path | None, typer.Option("--recipe")] = None

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The patterns that were given, by the recipe's field."""
        names = ("ignored_layers", "weight_only_layers")
        return {name: list(getattr(self, name)) for name in names if getattr(self, name)}

    def load_recipe(self, *, has_others: bool) -> "Recipe | None":
        """The recipe of the file, None without one; checks what these options say.

        has_others: whether other flags say what is quantized, too.
        """
        from octavo.recipe import Recipe

        if self.recipe_path is not None:
            if has_others or self.quantization is not None or self.patterns:
                raise ConfigError("expected --recipe or the flags that fill one, got both")
            return Recipe.load(self.recipe_path)
        if self.quantization not in (None, "fp8"):
            raise ConfigError(f"expected --quantization fp8, or none; got {self.quantization!r}")
        for name in self.patterns if self.quantization is None else ():
            raise _needs_fp8(name)
        return None


@dataclass(frozen=True, kw_only=True)
class OmniOptions:
    """What else is quantized in a pipeline of diffusers, and which steps are not computed.

    Attributes:
        quantization_config: JSON in place of --quantization: {method: fp8, weight_block_size:
            [128, 128], …}, or one of those for each component: {transformer: …, text_encoder: …,
            vae: null}.
        attention: Of the transformer: fp8.
        scale_path: Static scales of activations for --quantization fp8, from this file.
        cache_backend: tea_cache or first_block_cache: steps that change little are not computed.
        cache_config: Settings of the cache as JSON, such as '{"rel_l1_thresh": 0.2}'.
    """

    quantization_config: str | None = None
    attention: str | None = None
    scale_path: Path | None = None
    cache_backend: str | None = None
    cache_config: str | None = None

    def words(self, linear: LinearOptions) -> dict[str, Any]:
        """The arguments of `octavo.Omni` that both groups of options mean."""
        cache = {
            "cache_backend": self.cache_backend,
            "cache_config": read_object("--cache-config", self.cache_config),
        }
        if self.cache_config is not None and self.cache_backend is None:
            raise ConfigError("--cache-config: expected a --cache-backend with it, got none")
        flags = (self.quantization_config, self.attention, self.scale_path)
        recipe = linear.load_recipe(has_others=any(flag is not None for flag in flags))
        if recipe is not None:
            return {"recipe": recipe, **cache}
        config = read_object("--quantization-config", self.quantization_config)
        if linear.quantization is None and self.scale_path is not None:
            raise _needs_fp8("scale_path")
        if linear.quantization is not None:
            if config is not None:
                raise ConfigError("expected --quantization or --quantization-config, got both")
            config = {"method": "fp8", **linear.patterns}
        if config is not None and self.scale_path is not None:
            config["activation_scheme"] = "static"
        scales = None if self.scale_path is None else str(self.scale_path)
        return {
            "quantization_config": config,
            "attention": self.attention,
            "scales": scales,
            **cache,
        }


def _needs_fp8(name: str) -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')} needs --quantization fp8, got none")

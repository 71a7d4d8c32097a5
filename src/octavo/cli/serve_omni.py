"""octavo serve --omni: a pipeline of diffusers behind OpenAI's API for images."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from octavo.cli.console import err
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.serving.server.bind import Address
    from octavo.serving.server.settings import ServerSettings

# Parameters of `serve` that are for pipelines alone, and those that are for either kind.
OMNI = frozenset(
    {"quantization_config", "attention", "linear_scale_path", "cache_backend", "cache_config"}
)
BOTH = frozenset(
    {
        *("model", "omni", "served_model_name", "host", "port", "dtype", "device", "recipe_path"),
        *("quantization", "ignored_layers", "weight_only_layers", "api_key", "max_queue"),
        *("max_body_mib", "timeout_s", "grace_s", "cors_origin", "log_level"),
        *("allowed_host", "max_connections", "header_timeout_s", "body_timeout_s"),
    }
)


def check_flags(context: typer.Context, *, is_omni: bool) -> None:
    """Raise for a flag that is of the other kind of model: it would change nothing."""
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in BOTH:
            continue
        if (name in OMNI) != is_omni:
            flag = parameter.opts[0]
            if is_omni:
                raise ConfigError(f"{flag} is for language models: leave it out, or --omni")
            raise ConfigError(f"{flag} needs --omni, got none: add it, or leave {flag} out")


def serve_omni(
    model: str | None,
    words: Mapping[str, Any],
    settings: "ServerSettings",
    address: "Address",
    *,
    dtype: str,
    device: str | None,
    log_level: str,
) -> None:
    """Serve a pipeline at this address; `words` are arguments of `octavo.Omni`."""
    from octavo.serving.engine.omni import Omni
    from octavo.serving.server.image_app import create_image_app
    from octavo.serving.server.run import run

    with err.status("loading the pipeline"):
        omni = Omni(model, dtype=None if dtype == "auto" else dtype, device=device, **words)
    app = create_image_app(omni, settings)
    err.print(f"{omni.model_name}: {omni.precision}", soft_wrap=True)
    err.print(address.announcement(), markup=False, soft_wrap=True)
    run(app, address, log_level=log_level)

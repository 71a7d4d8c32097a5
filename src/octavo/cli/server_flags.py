"""Flags of a server, whatever it serves."""

from typing import Annotated

import typer

ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        "--served-model-name",
        help="What clients may call the model; may be given more than once, the first is the "
        "one that answers carry. Left out: the model's own.",
        show_default=False,
    ),
]
Host = Annotated[str, typer.Option("--host", help="0.0.0.0 for other machines.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535)]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="Key that clients must send; may be given more than once. OCTAVO_API_KEY does the "
        "same, and other users of the machine do not see it.",
        show_default=False,
    ),
]
MaxQueue = Annotated[
    int, typer.Option("--max-queue", min=1, help="Requests that may wait; more get 429.")
]
MaxBodyMib = Annotated[int, typer.Option("--max-body-mib", min=1, help="Size of a request's body.")]
RequestTimeout = Annotated[
    float, typer.Option("--request-timeout", help="Seconds for a whole answer; 0 is for ever.")
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        min=0,
        help="Seconds that open requests get after SIGTERM; Ctrl-C gives at most 5.",
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        help="Origin of pages that may ask from a browser; may be given more than once.",
        show_default=False,
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        help="Name under which clients reach this server, beside IP addresses, localhost and the "
        "machine's own; may be given more than once. Checked only without --api-key.",
        show_default=False,
    ),
]
MaxConnections = Annotated[
    int, typer.Option("--max-connections", min=1, help="Open connections; more get 503.")
]
HeaderTimeout = Annotated[
    float,
    typer.Option("--header-timeout", help="Seconds for a request's headers; later ones get 408."),
]
BodyTimeout = Annotated[
    float,
    typer.Option("--body-timeout", help="Seconds for a request's body; later ones get 408."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", min=1, help="The most one request may ask for.", show_default=False
    ),
]
ImageHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-image-hosts",
        help="Host that images may be fetched from; may be given more than once. Left out, "
        "only data: URLs are read.",
        show_default=False,
    ),
]
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]

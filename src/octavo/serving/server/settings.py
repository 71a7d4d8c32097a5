"""What the server allows."""

from dataclasses import dataclass, field

from octavo.errors import ConfigError


def _check_limits(settings: object) -> None:
    for name, value in vars(settings).items():
        is_limit = name.startswith("max_") or name.endswith("timeout_s")
        if is_limit and value is not None and not value > 0:
            raise ConfigError(f"expected {name} above 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What images in messages may be; pixels are those that a file declares.

    Attributes:
        max_images: In a request.
        max_bytes: Of one image.
        max_request_bytes: Of all images of a request.
        max_pixels: Of one image.
        max_request_pixels: Of all images of a request.
        max_server_pixels: Of all requests whose images are being decoded or wait for their answer;
            more wait for room.
        allowed_hosts: Hosts that images may be fetched from; without any, only data: URLs are read.
        fetch_timeout_s: Seconds for fetching an image.
    """

    max_images: int = 16
    max_bytes: int = 16 * 2**20
    max_request_bytes: int = 32 * 2**20  # as much as a body may have
    max_pixels: int = 32 * 10**6
    max_request_pixels: int = 64 * 10**6  # two of the largest, or 16 of 2000 x 2000
    # Four of the largest requests. Prepared for the model in BF16, they are 3 GB.
    max_server_pixels: int = 256 * 10**6
    allowed_hosts: tuple[str, ...] = ()
    fetch_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        _check_limits(self)
        if not self.max_pixels <= self.max_request_pixels <= self.max_server_pixels:
            raise ConfigError(
                "expected max_pixels <= max_request_pixels <= max_server_pixels, got "
                f"{self.max_pixels:,}, {self.max_request_pixels:,} and {self.max_server_pixels:,}"
            )


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Who may ask, how much, and for how long.

    Attributes:
        model_names: What clients may call the model; may be given more than once, the first is the
            one that answers carry. Left out: the model's own.
        api_keys: Key that clients must send; may be given more than once. OCTAVO_API_KEY does the
            same, and other users of the machine do not see it.
        max_body_bytes: Size of a request's body.
        max_open_body_bytes: Of the bodies of all open requests together, not counting those below
            64 KiB; more are refused.
        max_body_values: Commas and brackets in a body, since each may be a value to parse.
        max_tokens: The most one request may ask for; left out, what the context holds.
        max_open: Requests inside the server, from arrival to end; more are refused.
        timeout_s: Seconds from arrival to the last token; None disables the timeout.
        grace_s: Seconds that open requests get after SIGTERM; Ctrl-C gives at most 5.
        retry_after_s: Seconds after which a client that was refused may try again.
        cors_origins: Origin of pages that may ask from a browser; may be given more than once.
        allowed_hosts: Name under which clients reach this server, beside IP addresses, localhost
            and the machine's own; may be given more than once. Checked only without --api-key.
        max_connections: Open connections; more get 503.
        header_timeout_s: Seconds for a request's headers; later ones get 408.
        body_timeout_s: Seconds for a request's body; later ones get 408.
        send_timeout_s: Seconds after which a client that reads nothing of its answer is dropped.
        images: What images in messages may be.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 32 * 2**20
    max_open_body_bytes: int = 512 * 2**20
    max_body_values: int = 300_000
    max_tokens: int | None = None
    max_open: int = 1024
    timeout_s: float | None = 600.0
    grace_s: float = 30.0
    retry_after_s: int = 1
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_connections: int = 2048
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    images: ImageLimits = ImageLimits()

    def __post_init__(self) -> None:
        _check_limits(self)
        if not self.grace_s >= 0:
            raise ConfigError(f"expected grace_s of 0 or more, got {self.grace_s}")
        if any(not key.isascii() or not key.strip() for key in self.api_keys):
            raise ConfigError("expected API keys of ASCII characters, got another one or none")

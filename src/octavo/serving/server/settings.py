"""What the server allows."""

from dataclasses import dataclass, field

from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What images may be; without allowed hosts only data: URLs are read.

    max_images, max_request_bytes, max_request_pixels: of all images of a request. max_bytes,
    max_pixels: of one image; pixels are those that its file declares. max_server_pixels: of all
    requests whose images are being decoded or wait for their answer; more wait for room.
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
        for name, value in vars(self).items():
            if name != "allowed_hosts" and not value > 0:
                raise ConfigError(f"expected {name} above 0, got {value}")
        if not self.max_pixels <= self.max_request_pixels <= self.max_server_pixels:
            raise ConfigError(
                "expected max_pixels <= max_request_pixels <= max_server_pixels, got "
                f"{self.max_pixels:,}, {self.max_request_pixels:,} and {self.max_server_pixels:,}"
            )


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Who may ask, how much, and for how long.

    model_names: what `model` may be in a request; the first is what answers say; empty is the
    engine's own name. max_tokens: the most that one request may ask for, None for the context.
    max_open: requests inside the server, from arrival to end; more are refused. timeout_s: from
    arrival to the last token, None for no limit. max_open_body_bytes: of the bodies of all open
    requests together, not counting those below 64 KiB; more are refused. max_body_values: commas
    and brackets in a body, since each may be a value to parse. grace_s: what open
    requests get when the server ends. cors_origins: pages of other origins that may ask; none by
    default. allowed_hosts: names that a Host header may have where there is no key, besides IP
    addresses, localhost and this machine's own name. header_timeout_s, body_timeout_s: how long a
    client may take to send them. send_timeout_s: after which a client that reads nothing of its
    answer is dropped.
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
        positive = {
            "max_body_bytes": self.max_body_bytes,
            "max_open_body_bytes": self.max_open_body_bytes,
            "max_body_values": self.max_body_values,
            "max_tokens": self.max_tokens,
            "max_open": self.max_open,
            "timeout_s": self.timeout_s,
            "max_connections": self.max_connections,
            "header_timeout_s": self.header_timeout_s,
            "body_timeout_s": self.body_timeout_s,
            "send_timeout_s": self.send_timeout_s,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ConfigError(f"expected {name} above 0, got {value}")
        if not self.grace_s >= 0:
            raise ConfigError(f"expected grace_s of 0 or more, got {self.grace_s}")
        if any(not key.isascii() or not key.strip() for key in self.api_keys):
            raise ConfigError("expected API keys of ASCII characters, got another one or none")

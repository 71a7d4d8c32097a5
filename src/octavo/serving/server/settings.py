"""What the server allows."""

from dataclasses import dataclass, field

from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What an image_url may be; without allowed hosts only data: URLs are read."""

    max_images: int = 16
    max_bytes: int = 16 * 2**20
    max_pixels: int = 32 * 10**6
    allowed_hosts: tuple[str, ...] = ()
    fetch_timeout_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Who may ask, how much, and for how long.

    model_names: what `model` may be in a request; the first is what answers say; empty is the
    engine's own name. max_tokens: the most that one request may ask for, None for the context.
    max_open: requests inside the engine, running and waiting; more are refused. timeout_s: from
    accepting a request to its last token, None for ever. grace_s: what open requests get when the
    server ends. cors_origins: pages of other origins that may ask; none by default. allowed_hosts:
    names that a Host header may have where there is no key, besides IP addresses, localhost and
    this machine's own name. header_timeout_s, body_timeout_s: what a client has to send them in;
    send_timeout_s: after which one that reads nothing of its answer is dropped.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 32 * 2**20
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
            "max_tokens": self.max_tokens,
            "max_open": self.max_open,
            "timeout_s": self.timeout_s,
            "max_connections": self.max_connections,
            "header_timeout_s": self.header_timeout_s,
            "body_timeout_s": self.body_timeout_s,
            "send_timeout_s": self.send_timeout_s,
            "max_images": self.images.max_images,
            "max_bytes": self.images.max_bytes,
            "max_pixels": self.images.max_pixels,
            "fetch_timeout_s": self.images.fetch_timeout_s,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ConfigError(f"expected {name} above 0, got {value}")
        if not self.grace_s >= 0:
            raise ConfigError(f"expected grace_s of 0 or more, got {self.grace_s}")
        if any(not key.isascii() or not key.strip() for key in self.api_keys):
            raise ConfigError("expected API keys of ASCII characters, got another one or none")

"""The server's address, taken before the model loads; nobody can connect until it listens."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from octavo.errors import ConfigError

# An address of a name that this machine does not have, such as ::1 where IPv6 is off.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(frozen=True)
class Address:
    """Bound sockets, one for each address of the host, all with the same port."""

    host: str
    port: int
    sockets: tuple[socket.socket, ...]

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def announcement(self) -> str:
        """A line for the person who starts the server."""
        return f"{self.url}/ is the page, {self.url}/v1 the API"

    def allow_successor(self) -> None:
        """Let the next server have the port while the kernel remembers this one's connections."""
        for one in self.sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


@contextmanager
def bound(host: str, port: int) -> Iterator[Address]:
    """Take the address, and give it back at the end; ConfigError if it cannot be had."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"expected --host of this machine, got {host!r}: {error}") from None
    sockets: list[socket.socket] = []
    with ExitStack() as stack:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            try:
                one = stack.enter_context(socket.socket(family, kind, protocol))
                _bind(one, (place[0], port, *place[2:]))
            except OSError as error:
                if error.errno in _ABSENT and len(found) > 1:
                    continue
                raise ConfigError(_problem(host, port, error)) from None
            sockets.append(one)
            port = one.getsockname()[1]
        if not sockets:
            raise ConfigError(f"expected --host of this machine, got {host!r}, which is another")
        yield Address(host, port, tuple(sockets))


def _bind(one: socket.socket, place: tuple[object, ...]) -> None:
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(place)
    # Two sockets with this option may be bound to one port until the first of them listens. A
    # server that loads its model keeps its port to itself.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def _problem(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port {port} of {host} is in use: choose another with --port (0 takes a free "
                "one), or end the program that has it"
            )
        case errno.EACCES:
            return f"port {port} needs more rights than this user has: choose one from 1024 on"
        case errno.EADDRNOTAVAIL:
            return f"expected --host of this machine (0.0.0.0 is all of them), got {host}"
    return f"cannot listen on port {port} of {host}: {error.strerror}"

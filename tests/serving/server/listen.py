"""A process that serves: python listen.py fake|tiny PORT STEP_S SETTINGS_JSON.

fake: the engine without a model, whose steps take STEP_S. tiny: a model with random weights, and
limits that a crowd reaches. SIGUSR1 makes it write one line to stdout: the bytes of its memory, the
number of its Python objects, and how many of them are connections and tasks.
"""

import asyncio
import ctypes
import gc
import json
import signal
import sys
from pathlib import Path

from fake_engine import FakeEngine, FakeGrammar

from octavo.serving.server.app import create_app
from octavo.serving.server.bind import bound
from octavo.serving.server.http_protocol import LimitedProtocol
from octavo.serving.server.run import run
from octavo.serving.server.settings import ServerSettings

TINY_LIMITS = {"max_open": 200, "max_body_bytes": 20_000}


def tiny_engine():
    """Few pages for many requests, so that some are preempted."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
    import torch
    from tiny_engine import make_engine, make_model

    torch.set_num_threads(1)
    return make_engine(
        make_model(eos_token_id=7), num_pages=64, max_num_seqs=48, max_num_batched_tokens=256
    )


def tell_memory(*_):
    """Write what is in use after all that is unused was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    kinds = [type(one) for one in gc.get_objects()]
    found = {
        "rss_bytes": pages * 4096,
        "num_objects": len(kinds),
        "num_connections": sum(issubclass(kind, LimitedProtocol) for kind in kinds),
        "num_tasks": sum(issubclass(kind, asyncio.Task) for kind in kinds),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    kind, port, step_s, settings_json = sys.argv[1:]
    settings = json.loads(settings_json)
    if kind == "fake":
        engine = FakeEngine(step_s=float(step_s))
        app = create_app(engine, ServerSettings(**settings), FakeGrammar)
    else:
        app = create_app(tiny_engine(), ServerSettings(**TINY_LIMITS, **settings))
    signal.signal(signal.SIGUSR1, tell_memory)
    with bound("127.0.0.1", int(port)) as address:
        run(app, address)

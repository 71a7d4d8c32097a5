"""A process that serves, as child_server.py starts it.

    python -m octavo_testkit.serving.listen fake|tiny|vision PORT STEP_S SETTINGS_JSON

fake: the engine without a model, whose steps take STEP_S. tiny: a model with random weights, and
limits that a crowd reaches. vision: a model that takes images. SIGUSR1 makes it write
one line to stdout: the bytes of its memory now and at their peak, its worker processes included;
how many Python objects, connections, tasks and open files it has; and the longest time for which
the event loop did nothing. The last SIGUSR1 is where peaks begin.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from octavo.serving.server.admission import LimitedProtocol
from octavo.serving.server.app import create_app
from octavo.serving.server.run import bound, run
from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine, FakeGrammar

TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}
{% else %}{% for part in message.content %}{% if part.type == "image" %}<|start|><|image|><|stop|>
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""
TINY_LIMITS = {"max_open": 200, "max_body_bytes": 20_000}


def tiny_engine():
    """Few pages for many requests, so that some are preempted."""
    import torch

    from octavo_testkit.serving.tiny_engine import make_engine, make_model

    torch.set_num_threads(1)
    return make_engine(
        make_model(eos_token_id=7), num_pages=40, max_num_seqs=48, max_num_batched_tokens=256
    )


def vision_engine():
    """A model that takes texts, images and grammars, with room for a crowd."""
    import torch

    from octavo.serving.engine.engine import load_engine
    from octavo.serving.engine.settings import EngineSettings
    from octavo_testkit.models.text_models import make_tokenizer
    from octavo_testkit.models.vision_families import make_model, make_processor

    torch.set_num_threads(1)
    tokenizer = make_tokenizer(TEMPLATE, has_bos=False)
    image_tokens = ["<|start|>", "<|image|>", "<|stop|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": image_tokens})
    model = make_model("qwen3_vl", vocab_size=len(tokenizer), max_position_embeddings=8192)
    model.config.image_token_id = tokenizer.convert_tokens_to_ids("<|image|>")
    model.generation_config.eos_token_id = tokenizer.pad_token_id
    return load_engine(
        model,
        None,
        EngineSettings(num_pages=1024, max_num_seqs=64),
        tokenizer=tokenizer,
        image_processor=make_processor(),
    )


def rss_bytes():
    """Memory of this process and of all its descendants; what they share counts once."""
    total = 0
    for pid in ("self", *map(str, descendants(os.getpid()))):
        with contextlib.suppress(OSError):
            found = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(re.search(r"Pss: +(\d+) kB", found)[1]) * 1024
    return total


def descendants(pid):
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(child)]
    return found


class Watch:
    """Peaks since the last reset."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.max_stall_s = 0.0
        self.peak_bytes = 0

    def watch_memory(self):
        while True:
            self.peak_bytes = max(self.peak_bytes, rss_bytes())
            time.sleep(0.2)

    async def watch_loop(self):
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now_s = time.monotonic()
            self.max_stall_s = max(self.max_stall_s, now_s - last_s)
            last_s = now_s


WATCH = Watch()


def watched(app):
    """The application, with a task that watches its event loop and a thread for memory."""
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async with inner(app) as state:
            watching = asyncio.ensure_future(WATCH.watch_loop())
            threading.Thread(target=WATCH.watch_memory, daemon=True).start()
            yield state
            watching.cancel()

    app.router.lifespan_context = lifespan
    return app


def tell_memory(*_):
    """Write what is in use after all that is unused was given back."""
    max_stall_s, peak_bytes = WATCH.max_stall_s, WATCH.peak_bytes
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    kinds = [type(one) for one in gc.get_objects()]
    found = {
        "rss_bytes": pages * 4096,
        "num_objects": len(kinds),
        "num_connections": sum(issubclass(kind, LimitedProtocol) for kind in kinds),
        "num_tasks": sum(issubclass(kind, asyncio.Task) for kind in kinds),
        "num_files": len(os.listdir("/proc/self/fd")),
        "all_bytes": rss_bytes(),
        "peak_bytes": peak_bytes,
        "max_stall_s": max_stall_s,
    }
    print(json.dumps(found), flush=True)
    WATCH.reset()


if __name__ == "__main__":
    kind, port, step_s, settings_json = sys.argv[1:]
    settings = json.loads(settings_json)
    if kind == "fake":
        engine = FakeEngine(step_s=float(step_s))
        app = create_app(engine, ServerSettings(**settings), FakeGrammar)
    elif kind == "vision":
        app = watched(create_app(vision_engine(), ServerSettings(**settings)))
        app.state.server.jobs.warm_up()
    else:
        app = create_app(tiny_engine(), ServerSettings(**TINY_LIMITS, **settings))
    signal.signal(signal.SIGUSR1, tell_memory)
    with bound("127.0.0.1", int(port)) as address:
        run(app, address)

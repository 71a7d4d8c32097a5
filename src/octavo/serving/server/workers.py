"""Child processes that do slow work for requests, and that can be killed at any moment.

Threads cannot be stopped: a tokenizer or a grammar compiler that is at work for a client who has
left would go on. A child process can. Children come from Python's fork server, which has imported
what they need, so a new one is there within milliseconds of the old one's end.
"""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from octavo.errors import OctavoError

NICE = 15
MAX_GROWN_BYTES = 2**30  # of a child; a task that needs more fails
START_S = 60.0
PRELOADED = ["__main__", "octavo.serving.server.prompts", "octavo.serving.engine.guided"]


class WorkerError(OctavoError):
    """A task that took too long, needed too much memory, or ended its process."""


class Workers:
    """A few child processes; `set_up`, called in each of them, makes what their tasks work with.

    Large tasks leave one worker to the small ones, which so never wait for a large one.
    """

    def __init__(self, num_workers: int, set_up: Callable[[], Any]) -> None:
        # Pickled once, when the first worker starts: a large tokenizer takes a while.
        self._set_up = cache(lambda: pickle.dumps(set_up))
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._room = asyncio.Semaphore(num_workers)
        self._large_room = asyncio.Semaphore(max(1, num_workers - 1))
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="octavo-workers")

    async def run(
        self, task: Callable[..., Any], *args: Any, limit_s: float, is_large: bool = False
    ) -> Any:
        """What `task(made by set_up, *args)` returns or raises in a child process.

        WorkerError if it takes longer than limit_s, not counting the wait for a worker, or ends
        the process. Cancelling this kills the process.
        """
        async with self._take(is_large) as worker:
            loop = asyncio.get_running_loop()
            answer = loop.run_in_executor(self._threads, worker.ask, (task, args), limit_s)
            try:
                is_result, value = await asyncio.shield(answer)
            except asyncio.CancelledError:
                worker.kill()
                answer.add_done_callback(_take_exception)
                raise
        if not is_result:
            raise value
        return value

    def start(self) -> "Future[None]":
        """Start a worker in a thread, so that the first task does not wait for it."""
        worker = _Worker(self._set_up)
        self._idle.append(worker)
        return self._threads.submit(worker.start)

    def close(self) -> None:
        """Kill all workers, whatever they do."""
        for worker in (*self._idle, *self._busy):
            worker.kill()
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def _take(self, is_large: bool) -> AsyncIterator["_Worker"]:
        async with contextlib.AsyncExitStack() as held:
            if is_large:
                await held.enter_async_context(self._large_room)
            await held.enter_async_context(self._room)
            worker = self._idle.pop() if self._idle else _Worker(self._set_up)
            self._busy.add(worker)
            try:
                yield worker
            finally:
                self._busy.discard(worker)
                if not worker.is_dead:
                    self._idle.append(worker)


def _take_exception(answer: "asyncio.Future[Any]") -> None:
    """Look at the error of a killed worker, which nobody waits for."""
    if not answer.cancelled():
        answer.exception()


class _Worker:
    """One child process; it starts with its first task."""

    def __init__(self, set_up: Callable[[], bytes]) -> None:
        self._killed = threading.Event()
        self._starting = threading.Lock()
        self._set_up = set_up
        self._process: Any = None
        self._connection: Connection | None = None

    @property
    def is_dead(self) -> bool:
        return self._killed.is_set()

    def start(self) -> None:
        """Start the process unless it runs; called in a thread."""
        with self._starting:
            if self._process is not None:
                return
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self._set_up()), daemon=True)
            process.start()
            theirs.close()
            self._process, self._connection = process, ours
        if self.is_dead:  # killed meanwhile
            self.kill()

    def ask(self, task: Any, limit_s: float) -> tuple[bool, Any]:
        """(whether it returned, what it returned or raised); called in a thread."""
        try:
            self.start()
            connection = self._connection
            assert connection is not None
            if not connection.poll(START_S) or connection.recv() != "ready":
                raise WorkerError("a worker process did not start")
            connection.send(task)
            if not connection.poll(limit_s):
                raise WorkerError(f"it took longer than {limit_s:g} s")
            answer: tuple[bool, Any] = connection.recv()
            return answer
        except (EOFError, OSError):
            self.kill()
            raise WorkerError("it needed too much memory, or ended its process") from None
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process now."""
        self._killed.set()
        if self._process is not None:
            self._process.kill()


def yield_to_others() -> None:
    """Let the calling thread run when others have nothing to do: the loop and the engine first."""
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)  # only root may lower it
    os.setpriority(os.PRIO_PROCESS, thread, max(NICE, now))


def _work(connection: Connection, set_up: bytes) -> None:
    """A child process: do one task after the other until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's
    yield_to_others()
    made = pickle.loads(set_up)()
    _limit_memory()
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send("ready")
            task, args = connection.recv()
            connection.send(_result(task, made, args))


def _result(task: Callable[..., Any], made: Any, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, task(made, *args)
    except MemoryError:
        return False, WorkerError("it needed too much memory")
    except Exception as error:
        return False, error
    # A panic of a library in Rust is none of Exception's.
    except BaseException as error:
        return False, WorkerError(f"{type(error).__name__}: {error}")


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        data_pages = int(file.read().split()[5])
    limit = data_pages * resource.getpagesize() + MAX_GROWN_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

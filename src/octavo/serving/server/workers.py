"""Child processes that do slow work for requests, and that can be killed at any moment.

Threads cannot be stopped: a tokenizer or a grammar compiler that is at work for a client who has
left would go on. A child process can. Children come from Python's fork server, which has imported
what they need, so that a new one starts quickly.
"""

import asyncio
import contextlib
import heapq
import itertools
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from octavo.errors import OctavoError
from octavo.serving.server.api_error import ApiError

NICE = 15
LARGE = 8 * 1024  # characters
MAX_GROWN_BYTES = 2**30  # of a child; a task that needs more fails
START_S = 60.0
# Time limits are CPU time: on a busy machine a small task may wait long for its turn. A task that
# makes no progress at all is given up after so many times its limit.
PATIENCE = 10
PRELOADED = ["__main__", "octavo.serving.server.guidance"]


class WorkerError(OctavoError):
    """A task that needed too much time or memory, or ended its process."""


class _NotReady(Exception):
    """A process that did not start, or has ended before it got its task."""


class Workers:
    """A few child processes; `set_up`, called in each of them, makes what their tasks work with.

    Of the tasks that wait the smallest is next, and large ones leave one worker to the others.
    preload: a module that set_up needs.
    """

    def __init__(
        self, num_workers: int, set_up: Callable[[], Any], *, preload: str | None = None
    ) -> None:
        # Pickled once, when the first worker starts: a large tokenizer takes a while.
        self._set_up = cache(lambda: pickle.dumps(set_up))
        self._preload = [*PRELOADED, *filter(None, [preload])]
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        # Places, and those of them that large tasks may take.
        self._room = WaitingRoom(num_workers, max(1, num_workers - 1))
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="octavo-workers")

    async def run(self, task: Callable[..., Any], *args: Any, limit_s: float, size: int = 0) -> Any:
        """What `task(made by set_up, *args)` returns or raises in a child process.

        limit_s: the CPU time that it may take. size: about the characters that it looks at.
        WorkerError if it needs more time, or ends the process. ApiError if no process starts, or
        the machine is too busy to run it. Cancelling this kills the process.
        """
        needs = (1, int(size > LARGE))
        await self._room.enter(*needs, rank=size)
        try:
            for _ in range(2):  # an idle process may have been killed by somebody else
                with contextlib.suppress(_NotReady):
                    is_result, value = await self._ask((task, args), limit_s)
                    break
            else:
                message = "no process could be started for this request"
                raise ApiError(503, message, "worker_failed")
        finally:
            self._room.leave(*needs)
        if not is_result:
            raise value
        return value

    async def _ask(self, task: Any, limit_s: float) -> tuple[bool, Any]:
        worker = self._idle.pop() if self._idle else self._new()
        self._busy.add(worker)
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._threads, worker.ask, task, limit_s)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            worker.kill()
            # Nobody waits for the error of a killed worker.
            answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())
            raise
        finally:
            self._busy.discard(worker)
            if not worker.is_dead:
                self._idle.append(worker)

    def start(self) -> None:
        """Start a worker in a thread, so that the first task does not wait for it."""
        self._idle.append(self._new())

    def close(self) -> None:
        """Kill all workers, whatever they do."""
        for worker in (*self._idle, *self._busy):
            worker.kill()
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _new(self) -> "_Worker":
        return _Worker(self._threads.submit(_start, self._set_up, self._preload))


class WaitingRoom:
    """Room of one or more kinds, and the coroutines that wait for it; nothing here is for threads.

    The one with the lowest rank is next, the first of equals; nobody overtakes it.
    """

    def __init__(self, *free: int) -> None:
        self.free = list(free)
        self._waiting: list[tuple[int, int, tuple[int, ...], asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Those who have not found room yet."""
        return sum(not turn.done() for *_, turn in self._waiting)

    async def enter(self, *needs: int, rank: int = 0) -> None:
        """Wait for so much room of each kind; who is cancelled meanwhile leaves nothing behind."""
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._order), needs, turn))
        self._admit()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # its turn had just come
                self.leave(*needs)
            else:
                turn.cancel()
                self._admit()
            raise

    def leave(self, *needs: int) -> None:
        """Give room back."""
        self.free = [free + need for free, need in zip(self.free, needs, strict=True)]
        self._admit()

    def _admit(self) -> None:
        """Let in those in front that fit; those that have left make way."""
        while self._waiting:
            _, _, needs, turn = self._waiting[0]
            left = [free - need for free, need in zip(self.free, needs, strict=True)]
            if not turn.done():
                if min(left) < 0:
                    return
                self.free = left
                turn.set_result(None)
            heapq.heappop(self._waiting)


class _Worker:
    """One child process, which may be starting still."""

    def __init__(self, starting: "Future[tuple[Any, Connection]]") -> None:
        self._starting = starting
        self.is_dead = False

    def ask(self, task: Any, limit_s: float) -> tuple[bool, Any]:
        """(whether it returned, what it returned or raised); called in a thread."""
        try:
            return self._ask(task, limit_s)
        except BaseException:
            self.kill()
            raise

    def _ask(self, task: Any, limit_s: float) -> tuple[bool, Any]:
        is_ready = False
        with contextlib.suppress(EOFError, OSError):
            process, connection = self._starting.result()
            is_ready = connection.poll(START_S) and connection.recv() == "ready"
        if not is_ready or not process.is_alive():
            raise _NotReady
        try:
            connection.send((task, limit_s))
            if connection.poll(PATIENCE * limit_s):
                answer: tuple[bool, Any] = connection.recv()
                return answer
        except (EOFError, OSError):
            process.join(1.0)
            problem = "ended its process, or needed too much memory"
            if process.exitcode == -signal.SIGPROF:
                problem = f"took longer than {limit_s:g} s"
            raise WorkerError(f"the work on it {problem}") from None
        raise ApiError(503, "this server is too busy for such a request now", "worker_busy")

    def kill(self) -> None:
        """End the process now, or as soon as it has started."""
        self.is_dead = True
        self._starting.add_done_callback(_kill)


def _start(set_up: Callable[[], bytes], preload: list[str]) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, set_up()), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _kill(starting: "Future[tuple[Any, Connection]]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        process, _ = starting.result()
        process.kill()


def yield_to_others() -> None:
    """Let the calling thread run when others have nothing to do: the loop and the engine first."""
    thread = threading.get_native_id()
    now = os.getpriority(os.PRIO_PROCESS, thread)  # only root may lower it
    os.setpriority(os.PRIO_PROCESS, thread, max(NICE, now))


def _work(connection: Connection, set_up: bytes) -> None:
    """A child process: do one task after the other until the connection ends."""
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # the server ends its workers itself
        signal.signal(sent_to_all, signal.SIG_IGN)
    yield_to_others()
    made = pickle.loads(set_up)()
    with open("/proc/self/statm") as file:
        data_pages = int(file.read().split()[5])
    limit = data_pages * resource.getpagesize() + MAX_GROWN_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send("ready")
            (task, args), limit_s = connection.recv()
            # The kernel ends the process with SIGPROF when it has had this CPU time.
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            result = _result(task, made, args)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(result)


def _result(task: Callable[..., Any], made: Any, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, task(made, *args)
    except MemoryError:
        return False, WorkerError("the work on it needed too much memory")
    except Exception as error:
        return False, error
    # A panic of a library in Rust is none of Exception's.
    except BaseException as error:
        return False, WorkerError(f"{type(error).__name__}: {error}")

"""One thread block of a simulated GPU: roles that take turns, copies and products under way."""

import random
import threading
import types

from octavo_testkit.kernels.simulated_memory import (
    Layout,
    Shared,
    SimulationError,
    as_registers,
    numbers,
)


class Machine:
    """One thread block: roles that take turns, and copies under way."""

    def __init__(self, seed, program, num_programs):
        self.random = random.Random(seed)
        self.program, self.num_programs = program, num_programs
        self.copies, self.roles, self.error = [], [], None
        self.back = threading.Semaphore(0)
        self.named = {}  # named barriers: (threads arrived, generation)
        self.current = None

    def run(self, functions):
        self.roles = [Role(self, function, args) for function, args in functions]
        for role in self.roles:
            role.thread.start()
        waiting = list(self.roles)
        while waiting:
            able = [role for role in waiting if role.ready()]
            choices = [*able, *self.copies]
            if not choices:
                self.stop(waiting)
                raise SimulationError(
                    "deadlock: " + "; ".join(f"{r.name} waits for {r.reason}" for r in waiting)
                )
            chosen = self.random.choice(choices)
            if isinstance(chosen, Copy):
                self.copies.remove(chosen)
                chosen.arrive()
                continue
            for role in self.roles:  # products read their operands at any time
                if role.products and self.random.random() < 0.3:
                    role.products[0].compute()
            self.current = chosen
            chosen.go.release()
            self.back.acquire()
            if self.error is not None:
                self.stop([role for role in waiting if role is not chosen])
                raise self.error
            waiting = [role for role in waiting if not role.is_done]
        if self.copies:
            raise SimulationError("a block ends before its copies arrive")

    def stop(self, roles):
        for role in roles:
            role.is_stopped = True
            role.go.release()
            role.thread.join()

    def wait(self, ready, reason):
        """Let others run, and go on at some time when `ready()`."""
        role = self.current
        if role is None:
            return
        role.ready, role.reason = ready, reason
        self.back.release()
        role.go.acquire()
        if role.is_stopped:
            raise SystemExit


class Role:
    """A warpgroup or the copying warp."""

    def __init__(self, machine, function, args):
        self.machine, self.products = machine, []
        self.name = f"{function.__name__}{[a for a in args if isinstance(a, int)]}"
        self.ready, self.reason, self.is_done, self.is_stopped = lambda: True, "", False, False
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self.run, args=(function, args), daemon=True)

    def run(self, function, args):
        self.go.acquire()
        try:
            if not self.is_stopped:
                function(*args)
                if self.products:
                    raise SimulationError("a role ends with products under way")
        except SystemExit:
            return
        except BaseException as error:
            self.machine.error = error
        self.is_done = True
        if not self.is_stopped:
            self.machine.back.release()


class Copy:
    """A TMA copy under way."""

    def __init__(self, descriptor, place, bar, target):
        if descriptor.block != target.shape:
            raise SimulationError(f"a copy of {descriptor.block} into {target.shape}")
        self.descriptor, self.place, self.bar, self.target = descriptor, place, bar, target

    def arrive(self):
        tile = self.descriptor.read(self.place)
        self.target.bits[...] = tile
        self.bar.change(size=-tile.size)


class Product:
    """A product under way, and its result afterwards; use before the wait is an error."""

    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, use_acc, None
        self.is_waited = False
        self.type = types.SimpleNamespace(layout=Layout())

    def compute(self):
        if self.value is None:
            a = numbers(self.a.bits if isinstance(self.a, Shared) else self.a.numpy())
            value = a @ numbers(self.b.bits)
            if self.use_acc:
                acc = self.acc
                if isinstance(acc, Product):
                    acc.compute()
                    acc = acc.value
                value = value + acc
            self.value = as_registers(value)

"""Runs Hopper's attention kernel on a CPU: its own source, with warps that run in any order.

Gluon has no interpreter. Here the kernel's functions run as plain Python over a small copy of
Gluon's language: every role is a thread, and a scheduler lets one of them run at a time, chosen at
random. TMA copies arrive whenever the scheduler says so; a product reads its operands at any time
between its start and the wait for it. So a wrong phase, a stage that is given back too early and a
copy of the wrong size show as a deadlock, an error or a wrong result.

What a register layout decides is not seen here: who has which element, and who must wait for whom
inside a warpgroup. PTX in strings is interpreted, so far as this kernel uses it.
"""

import inspect
import re
import sys
import textwrap
import types
from contextlib import contextmanager
from importlib import import_module

import numpy as np
import torch

from octavo_testkit.kernels.ptx_interpreter import exp2, run_ptx
from octavo_testkit.kernels.simulated_machine import Copy, Machine, Product
from octavo_testkit.kernels.simulated_memory import (
    I32,
    NAN,
    Barrier,
    Descriptor,
    Layout,
    Pointer,
    Shared,
    SimulationError,
    as_registers,
    constexpr,
)

MODULES = (
    *("gluon_tiles", "gluon_schedule", "gluon_softmax", "gluon_results", "gluon_roles"),
    "gluon_sm90",
)


class Language:
    """`triton.experimental.gluon.language` and modules beside it, for one machine at a time."""

    def __init__(self):
        self.machine = None
        gl = types.ModuleType("triton.experimental.gluon.language")
        for name in (
            *("NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout", "BlockedLayout"),
            *("DotOperandLayout", "DistributedLinearLayout"),
        ):
            setattr(gl, name, Layout())
        gl.constexpr = constexpr
        gl.tensor = gl.shared_memory_descriptor = object
        gl.float32, gl.int8, gl.int32 = torch.float32, torch.uint8, torch.int32
        gl.int64, gl.float8e4nv = torch.int64, torch.float8_e4m3fn
        gl.static_range = range
        gl.program_id = lambda axis: I32(self.machine.program)
        gl.num_programs = lambda axis: I32(self.machine.num_programs)
        gl.zeros = lambda shape, dtype, layout: as_registers(torch.zeros(tuple(shape), dtype=dtype))
        gl.full = lambda shape, x, dtype, layout: as_registers(
            torch.full(tuple(shape), x, dtype=dtype)
        )
        gl.arange = lambda start, end, layout: as_registers(torch.arange(start, end))
        gl.convert_layout = lambda x, layout: x
        gl.expand_dims = lambda x, axis: x.unsqueeze(axis)
        gl.where = self._where
        gl.maximum = lambda a, b: self._either(a, b, max, torch.fmax)
        gl.minimum = lambda a, b: self._either(a, b, min, torch.fmin)
        gl.max = lambda x, axis: self._extreme(x, axis, 1)
        gl.min = lambda x, axis: self._extreme(x, axis, -1)
        gl.sum = lambda x, axis: x.sum(axis)
        gl.log2 = torch.log2
        gl.load, gl.store = self._load, self._store
        gl.allocate_shared_memory = self._allocate
        gl.inline_asm_elementwise = self._assembly
        gl.warp_specialize = self._specialize
        gl.thread_barrier = lambda: None
        self.gl = gl

        gluon = types.ModuleType("triton.experimental.gluon")
        gluon.jit = lambda function=None, **_: function or (lambda f: f)
        gluon.constexpr_function = lambda function: function
        gluon.language = gl

        hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
        hopper.fence_async_shared = lambda: None
        hopper.warpgroup_mma, hopper.warpgroup_mma_wait = self._product, self._wait_products
        mbarrier = types.SimpleNamespace(
            MBarrierLayout=Layout(),
            init=lambda bar, count: bar.begin(count),
            expect=self._expect,
            arrive=self._arrive,
            wait=self._wait,
        )
        hopper.mbarrier = mbarrier
        tma = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper.tma")
        tma.tensor_descriptor, tma.async_load = object, self._copy
        hopper.tma = tma

        host = types.ModuleType("triton.experimental.gluon.nvidia.hopper")
        host.TensorDescriptor = Descriptor
        core = types.ModuleType("triton.language.core")
        core._aggregate = lambda cls: cls
        experimental = types.ModuleType("triton.experimental")
        experimental.gluon = gluon
        self.modules = {
            "triton.experimental": experimental,
            "triton.experimental.gluon": gluon,
            gl.__name__: gl,
            hopper.__name__: hopper,
            tma.__name__: tma,
            host.__name__: host,
            core.__name__: core,
        }

    def _where(self, condition, a, b):
        if isinstance(condition, (bool, np.bool_)):
            return a if condition else b
        return as_registers(torch.where(condition, a, b))

    def _either(self, a, b, of_numbers, of_tensors):
        if isinstance(a, int) and isinstance(b, int):
            return of_numbers(a, b)
        return as_registers(of_tensors(torch.as_tensor(a), torch.as_tensor(b)))

    def _extreme(self, x, axis, sign):
        """As maxnum does: NaN only where all are."""
        most = sign * torch.where(x.isnan(), -torch.inf, sign * x).amax(axis)
        return as_registers(torch.where(x.isnan().all(axis), torch.nan, most))

    def _load(self, pointer):
        offset = pointer.offset
        if not 0 <= offset < pointer.memory.numel():
            raise SimulationError(f"a load at {offset} of {pointer.memory.numel()}")
        value = pointer.memory.flatten()[int(offset)]
        return as_registers(value) if value.is_floating_point() else I32(int(value))

    def _store(self, pointer, value, mask):
        offset, value, mask = torch.broadcast_tensors(pointer.offset, value, mask)
        chosen = offset[mask]
        if offset.dtype != torch.int64:
            raise SimulationError(f"stores at {offset.dtype} offsets")
        memory = pointer.memory
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < memory.numel():
            raise SimulationError(f"a store at {int(chosen.min())} … {int(chosen.max())}")
        memory.view(-1)[chosen.as_subclass(torch.Tensor)] = value[mask].as_subclass(torch.Tensor)

    def _allocate(self, dtype, shape, layout):
        if dtype is torch.int64:
            return Shared(np.zeros(shape, np.int64), [Barrier() for _ in range(shape[0])])
        self.machine.shared_bytes = getattr(self.machine, "shared_bytes", 0) + int(np.prod(shape))
        if self.machine.shared_bytes > 227 * 1024:
            raise SimulationError(f"{self.machine.shared_bytes} bytes of shared memory")
        return Shared(np.full(tuple(shape), NAN, np.uint8))

    def _specialize(self, functions, warps, registers):
        assert len(functions) - 1 == len(warps) == len(registers)
        self.machine.run(functions)

    def _expect(self, bar, size):
        bar.change(arrivals=1, size=int(size))
        self.machine.wait(lambda: True, "a turn")

    def _arrive(self, bar, count):
        bar.change(arrivals=count)
        self.machine.wait(lambda: True, "a turn")

    def _wait(self, bar, phase):
        self.machine.wait(lambda: bar.phase != phase, f"phase {phase}")

    def _copy(self, descriptor, place, bar, target):
        self.machine.copies.append(Copy(descriptor, [int(at) for at in place], bar, target))
        self.machine.wait(lambda: True, "a turn")

    def _product(self, a, b, acc, use_acc, is_async):
        assert is_async
        product = Product(a, b, acc, use_acc)
        if isinstance(acc, Product) and acc.is_waited:
            product.acc = acc.value
        self.machine.current.products.append(product)
        self.machine.wait(lambda: True, "a turn")
        return product

    def _wait_products(self, num_left, deps):
        products = self.machine.current.products
        while len(products) > num_left:
            product = products.pop(0)
            product.compute()
            product.is_waited = True
        for dep in deps:
            if isinstance(dep, Product) and not dep.is_waited:
                raise SimulationError("a wait for a product that may be under way")
        done = tuple(dep.value if isinstance(dep, Product) else dep for dep in deps)
        return done if len(done) > 1 else done[0]

    def _assembly(self, asm, constraints, args, dtype, is_pure, pack):
        if asm.startswith("ex2"):
            return exp2(args[0])
        if match := re.match(r"bar\.(sync|arrive) (\d+), (\d+);", asm):
            return self._named_barrier(match[1], int(match[2]), int(match[3]))
        if "max.s32" in asm:
            return self._maxima(args[0])
        if "vote.sync" in asm:
            rows = args[0].any(1, keepdim=True).to(torch.int32)  # of [64, 4]: a warp has 16
            anywhere = rows.reshape(4, 16).any(1, keepdim=True).expand(4, 16).reshape(64, 1)
            return as_registers((rows | torch.where(anywhere, 2, 0)).expand(64, 4))
        if asm.startswith("mov.b32 $0, $1"):
            words = args[0][..., 0].contiguous()
            return as_registers(
                words.as_subclass(torch.Tensor).to(torch.int32).view(torch.uint8)
            ).view(*words.shape, 4)
        return run_ptx(asm, args, pack)

    def _maxima(self, bits):
        """Of each thread's keys in a row the largest logit, in the place of the first of them."""
        by_thread = bits.as_subclass(torch.Tensor).view(64, -1, 4, 2)
        found = by_thread.clone()
        found[:, 0, :, 0] = self._extreme(by_thread.permute(0, 2, 1, 3).flatten(2), 2, 1)
        return as_registers(found.view(bits.shape))

    def _named_barrier(self, kind, number, num_threads):
        """Barriers of two warpgroups: 128 threads arrive, and 128 wait."""
        arrived, generation = self.machine.named.get(number, (0, 0))
        arrived += 128
        if arrived == num_threads:
            arrived, generation = 0, generation + 1
        self.machine.named[number] = (arrived, generation)
        if kind == "sync" and arrived:
            self.machine.wait(
                lambda: self.machine.named[number][1] > generation, f"named barrier {number}"
            )
        else:
            self.machine.wait(lambda: True, "a turn")
        return as_registers(torch.zeros(()))


class Simulator:
    """The attention kernel's modules, loaded once more, over the language above."""

    def __init__(self, num_sms=2):
        self.language = Language()
        self.seed, self.num_sms = 0, num_sms
        self.num_programs = 0
        names = [f"octavo.kernels.attention.{name}" for name in MODULES]
        names += ["octavo.kernels.gluon_primitives", "octavo.kernels.launch"]
        with _other_modules(self.language.modules, names):
            module = import_module("octavo.kernels.attention.gluon_sm90")
            self.modules = {name: sys.modules[name] for name in names}
        self.module = module
        module.launch = self._launch
        module.describe = lambda device: types.SimpleNamespace(num_sms=self.num_sms)

    def attention(self, *args, **options):
        """`octavo.kernels.attention.gluon_sm90.attention`, on a CPU."""
        return self.module.attention(*args, **options)

    def module_named(self, name):
        return self.modules[f"octavo.kernels.attention.{name}"]

    def change(self, module, function, text, replacement):
        """Let a function have other text: what a test of the simulator does."""
        module = self.module_named(module)
        source = textwrap.dedent(inspect.getsource(getattr(module, function)))
        assert text in source, text
        source = source.replace(text, replacement).partition("@gluon.jit\n")[2]
        exec(source, vars(module))  # its callers look its name up there

    def _launch(self, kernel, grid, **arguments):
        arguments.pop("maxnreg")
        arguments.pop("num_warps")
        made = {name: self._argument(name, value) for name, value in arguments.items()}
        self.num_programs = grid[0]
        for program in range(grid[0]):
            self.seed += 1
            self.language.machine = Machine(self.seed, program, grid[0])
            kernel(**made)

    def _argument(self, name, value):
        if name.endswith("_ptr"):
            return Pointer(value)
        if isinstance(value, float):
            return as_registers(torch.tensor(value, dtype=torch.float32))
        if isinstance(value, int) and not name.isupper() and not name[1:2].isdigit():
            return I32(value)
        return constexpr(value)


@contextmanager
def _other_modules(modules, reloaded):
    """sys.modules with other modules of Triton, and octavo's loaded anew; restored afterwards."""
    from octavo import internals

    import_module("triton.experimental.gluon")  # the real one first, which others import whole
    names = [*modules, *reloaded]
    saved = {name: sys.modules.get(name) for name in names}
    packages = {name: import_module(name.rpartition(".")[0]) for name in reloaded}
    attributes = {name: packages[name].__dict__.get(name.rpartition(".")[2]) for name in reloaded}
    launch = types.ModuleType("octavo.kernels.launch")
    launch.launch = None
    require, internals.require = internals.require, lambda *names: None
    try:
        for name in reloaded:
            sys.modules.pop(name, None)
        sys.modules.update(modules)
        sys.modules["octavo.kernels.launch"] = launch
        yield
    finally:
        internals.require = require
        for name, module in saved.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        for name, value in attributes.items():
            if value is not None:
                setattr(packages[name], name.rpartition(".")[2], value)
            else:
                packages[name].__dict__.pop(name.rpartition(".")[2], None)

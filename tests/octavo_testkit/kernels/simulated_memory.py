"""Numbers, registers and memory of a simulated GPU, as octavo_testkit's simulator has them."""

import types

import numpy as np
import torch

NAN = 0x7F  # of e4m3: what shared memory has before anything is written


class SimulationError(AssertionError):
    """The kernel broke a rule of the machine."""


def _checked(value):
    if not -(2**31) <= value < 2**31:
        raise SimulationError(f"{value} does not fit 32 bits")
    return I32(value)


class I32(int):
    """A 32-bit integer of the device, which divides towards zero and must not overflow."""

    def to(self, dtype):
        return I64(self) if dtype is torch.int64 else I32(self)


class I64(I32):
    """A 64-bit integer of the device."""


def _quotient(a, b):
    return int(a) // int(b) if (a >= 0) == (b > 0) else -(-int(a) // int(b))


_OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": _quotient,
    "mod": lambda a, b: a - _quotient(a, b) * b,
}


def _operator(function, is_reflected):
    def apply(self, other):
        if not isinstance(other, int):
            return NotImplemented
        a, b = (other, self) if is_reflected else (self, other)
        value = function(int(a), int(b))
        if isinstance(self, I64) or isinstance(other, I64):
            return I64(value)
        return _checked(value)

    return apply


for _name, _function in _OPERATIONS.items():
    setattr(I32, f"__{_name}__", _operator(_function, False))
    setattr(I32, f"__r{_name}__", _operator(_function, True))


class ConstInt(int):
    value = property(lambda self: int(self))


class ConstFloat(float):
    value = property(lambda self: float(self))


class ConstStr(str):
    value = property(lambda self: str(self))

    __slots__ = ()


def constexpr(x):
    for kind, made in (
        ((bool, int), ConstInt),
        (float, ConstFloat),
        (str, ConstStr),
    ):
        if isinstance(x, kind):
            return made(x)
    return x


class Layout:
    """Any layout: nobody looks at it."""

    def __init__(self, *args):
        self.args = args

    def __call__(self, *args):
        return Layout(*args)

    def get_default_for(self, *args):
        return Layout(*args)


class T(torch.Tensor):
    """A tensor in registers."""

    type = property(lambda self: types.SimpleNamespace(layout=Layout()))

    def split(self):
        return self[..., 0], self[..., 1]

    def to(self, dtype, bitcast=False):
        if bitcast and dtype == torch.float32 and not self.is_floating_point():
            return as_registers(self.as_subclass(torch.Tensor).to(torch.int32).view(dtype))
        return self if bitcast else torch.Tensor.to(self, dtype)  # FP8 is bytes here


def as_registers(x):
    return torch.as_tensor(x).as_subclass(T)


class Pointer:
    """A pointer into a tensor, or many."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other):
        return Pointer(self.memory, other + self.offset)


class Shared:
    """A piece of shared memory."""

    def __init__(self, bits, barriers=None):
        self.bits, self.barriers = bits, barriers
        self.shape, self.dtype = bits.shape, torch.uint8

    def index(self, i):
        if self.barriers is not None:
            return self.barriers[i]
        return Shared(self.bits[i])

    def reshape(self, shape):
        made = self.bits.view()
        made.shape = tuple(shape)  # raises where numpy would copy
        return Shared(made)

    def permute(self, order):
        return Shared(self.bits.transpose(order))

    def slice(self, start, length, dim=0):
        index = [slice(None)] * self.bits.ndim
        index[dim] = slice(start, start + length)
        return Shared(self.bits[tuple(index)])

    def load(self, layout):
        return as_registers(torch.from_numpy(self.bits.copy()))

    def store(self, value):
        assert tuple(value.shape) == self.shape
        self.bits[...] = value.to(torch.uint8).numpy()


def numbers(bits):
    """e4m3 as float32."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.float8_e4m3fn).float()


class Descriptor:
    """What TMA copies tiles from."""

    def __init__(self, x, block, layout=None):
        for size, stride in list(zip(x.shape, x.stride(), strict=True))[:-1]:
            if stride % 16 and size > 1:
                raise SimulationError(f"stride {stride} of a descriptor")
        if x.data_ptr() % 16 or x.stride(-1) != 1:
            raise SimulationError("a descriptor of an unaligned tensor")
        if max(block) > 256:
            raise SimulationError(f"TMA copies at most 256 of each dimension, got {block}")
        self.bits = x.view(torch.uint8).numpy()
        self.block, self.layout, self.dtype = tuple(block), Layout(), "fp8e4nv"

    from_tensor = classmethod(lambda cls, x, block, layout: cls(x, block, layout))

    def read(self, place):
        tile = np.zeros(self.block, np.uint8)
        source, target = [], []
        for at, size, length in zip(place, self.block, self.bits.shape, strict=True):
            begin, end = max(0, at), max(0, min(at + size, length))
            source.append(slice(begin, max(begin, end)))
            target.append(slice(begin - at, begin - at + max(0, end - begin)))
        tile[tuple(target)] = self.bits[tuple(source)]
        return tile


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self):
        self.count = None

    def begin(self, count):
        self.count = self.pending = int(count)
        self.bytes, self.phase = 0, 0

    def change(self, arrivals=0, size=0):
        if self.count is None:
            raise SimulationError("an mbarrier before its init")
        self.pending -= arrivals
        self.bytes += size
        if self.pending < 0:
            raise SimulationError("more arrivals than an mbarrier counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count

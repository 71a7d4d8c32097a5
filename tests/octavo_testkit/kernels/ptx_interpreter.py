"""Interprets the PTX by which Hopper's attention kernel makes P, for all elements at once."""

import re
import struct

import torch

from octavo_testkit.kernels.simulated_memory import SimulationError, as_registers


def exp2(x):
    y = torch.exp2(torch.as_tensor(x))
    return as_registers(torch.where(y < 2.0**-126, 0.0, y))  # .ftz


def _e4m3(x):
    """cvt.rn.satfinite: one byte of each float32."""
    clamped = x.as_subclass(torch.Tensor).clamp(-448, 448)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int64)


def run_ptx(asm, args, pack):
    """PTX over all elements: `pack` of each operand at a time, in rows that branch alike."""
    shape = args[0].shape
    flat = [x.as_subclass(torch.Tensor).reshape(-1, pack) for x in args]
    # Of an operand in logical order, so that one run has elements of one row alone.
    assert shape[-1] % pack == 0
    operands = [column for x in flat for column in x.unbind(-1)]
    num_runs = flat[0].shape[0]
    results = torch.zeros(num_runs, pack, dtype=torch.int64)
    groups = [torch.arange(num_runs)]
    if "bra" in asm:
        is_far = flat[-1][:, 0] >= 2
        groups = [is_far.nonzero().flatten(), (~is_far).nonzero().flatten()]
    for chosen in groups:
        if len(chosen):
            found = _Ptx(asm, pack).run([x[chosen] for x in operands])
            results[chosen] = torch.stack(found, -1)
    results = torch.where(results >= 2**31, results - 2**32, results).to(torch.int32)
    return as_registers(results.reshape(shape))


class _Ptx:
    """An interpreter of the few instructions that make P; registers are vectors."""

    def __init__(self, asm, num_results):
        body = asm.strip().removeprefix("{").removesuffix("}")
        body = re.sub(r"\.reg [^;]*;", "", body)
        self.lines = [
            line.strip()
            for line in re.split(r";|(?<=:)\s|\n", body.replace(":", ":\n"))
            if line.strip()
        ]
        self.num_results = num_results
        self.registers = {}

    def run(self, operands):
        for i, x in enumerate(operands):
            self.registers[f"${self.num_results + i}"] = x
        labels = {line[:-1]: i for i, line in enumerate(self.lines) if line.endswith(":")}
        at = 0
        while at < len(self.lines):
            line = self.lines[at]
            at += 1
            if line.endswith(":"):
                continue
            guard = re.match(r"@(\w+) (.*)", line)
            if guard:
                flags = self.registers[guard[1]]
                if bool(flags.any()) != bool(flags.all()):
                    raise SimulationError("a branch that not all threads take")
                if not bool(flags.all()):
                    continue
                line = guard[2]
            op, _, rest = line.partition(" ")
            if op.startswith("bra"):
                at = labels[rest.strip()]
                continue
            to, *given = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
            self.step(op, to, given)
        return [self.registers[f"${i}"].to(torch.int64) for i in range(self.num_results)]

    def value(self, name):
        if name in self.registers:
            return self.registers[name]
        if name.startswith("0f"):
            return torch.tensor(struct.unpack(">f", bytes.fromhex(name[2:]))[0])
        if name.startswith("{"):
            low, high = (self.value(part.strip()) for part in name[1:-1].split(","))
            return low | high << 16
        return torch.tensor(int(name, 0))

    def step(self, op, to, given):
        x = [self.value(name) for name in given]
        match op:
            case "mov.b32":
                made = x[0]
            case "and.b32":
                made = x[0].to(torch.int64) & x[1]
            case "or.b32":
                made = x[0] | x[1]
            case "setp.ge.s32":
                made = x[0] >= x[1]
            case "setp.ne.s32":
                made = x[0] != x[1]
            case "selp.b32":
                made = torch.where(x[2], x[0], x[1])
            case "fma.rn.f32":
                made = (x[0].double() * x[1].double() + x[2].double()).float()
            case "ex2.approx.ftz.f32":
                made = exp2(x[0]).as_subclass(torch.Tensor)
            case "cvt.rn.satfinite.e4m3x2.f32":
                made = _e4m3(x[1]) | _e4m3(x[0]) << 8
            case "cvt.rn.satfinite.relu.f16x2.f32":
                made = _half_bits(_relu_half(x[1])) | _half_bits(_relu_half(x[0])) << 16
            case "fma.rn.f16x2":
                halves = [_half_fma(*(_half(y >> shift) for y in x)) for shift in (0, 16)]
                made = _half_bits(halves[0]) | _half_bits(halves[1]) << 16
            case "prmt.b32":
                made = torch.zeros_like(x[0])
                for i in range(4):
                    selector = int(x[2]) >> 4 * i & 0xF
                    assert selector < 8
                    source = x[0] if selector < 4 else x[1]
                    made = made | (source >> 8 * (selector % 4) & 0xFF) << 8 * i
            case _:
                raise SimulationError(f"no interpreter of {op}")
        self.registers[to] = made


def _relu_half(x):
    """float32 to float16 from 0 to the largest finite number; NaN stays."""
    half = x.as_subclass(torch.Tensor).half()
    return torch.where(half.isnan(), half, half.clamp(min=0, max=65504))


def _half_fma(a, b, c):
    return (a.double() * b.double() + c.double()).half()


def _half_bits(half):
    bits = half.view(torch.int16).to(torch.int64) & 0xFFFF
    return torch.where(half.isnan(), 0x7FFF, bits)


def _half(bits):
    word = bits & 0xFFFF
    signed = torch.where(word >= 0x8000, word - 0x10000, word)
    return signed.to(torch.int16).view(torch.float16)

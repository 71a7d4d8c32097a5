"""Calls that repeat: what one of them did on its device is done again, without the op's Python.

All that an op works out follows from the signature of a call: sizes, launch settings, compiled
kernels, buffers. `tape_call` runs one call and notes its steps (octavo.ops.tape); a `Playback` is
these steps as one straight Python function of the call's tensors. Where an operand's origin is
unknown, or a result depends on data, there is no playback, and calls go on as before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.internals import internals, require
from octavo.kernels.listening import Launch, listening
from octavo.ops.tape import Described, Operand, Tape, TapeError, TorchCall

with internals("torch"):
    from torch import _scaled_mm

require("torch.ops.aten")

# Parts of the buffer for what does not outlive a call start at multiples of so many bytes.
ALIGNMENT = 256
# What Triton and cuBLAS ask of an address, in bytes: aligned or not, kernels differ.
POINTER_ALIGNMENT = 16
# The same function with a binding of its own, which reads its arguments faster.
_BINDINGS = {torch.ops.aten._scaled_mm.default: _scaled_mm}


class Playback:
    """The steps of a taped call, for others with its signature.

    run: a function of the call; None in place of a result means that this call is another, by the
    alignment of its tensors, say. calls_torch: whether torch computes a part of it.
    """

    __slots__ = ("calls_torch", "run")

    def __init__(self, run: Callable[[Any], Any], calls_torch: bool) -> None:
        self.run, self.calls_torch = run, calls_torch


def tape_call(
    run: Callable[[], Any], inputs: Mapping[str, Tensor], gpu: int | None
) -> tuple[Any, Playback | None]:
    """The result of `run`, and how to do the same to other tensors; None if that is not known.

    run: gives a tensor or a tuple of tensors, none of which is an argument. inputs: its tensors, by
    Python that finds them in `call`.
    """
    tape = Tape(inputs)
    with listening(tape.launch), tape:
        result = run()
    if tape.problem is not None:
        return result, None
    try:
        function = _Writer(tape, result, gpu or 0).write()
    except Exception:  # whatever it stumbles over: the call is done, and others go on as before
        return result, None
    return result, Playback(function, any(isinstance(step, TorchCall) for step in tape.steps))


class _Memory:
    """A tensor descriptor that is its own tensor, as far as Triton asks for one: for an address."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    @property
    def base(self) -> "_Memory":
        return self

    def data_ptr(self) -> int:
        return self.pointer


def _descriptors_like(descriptor: Any) -> type:
    """A class of descriptors that differ in their memory alone; Triton has checked the first."""
    fields = {name: value for name, value in vars(descriptor).items() if name != "base"}
    return type("Descriptor", (_Memory,), {"__slots__": (), **fields})


@dataclass
class _Writer:
    """Writes a tape as a Python function of `call`."""

    tape: Tape
    result: Any
    gpu: int
    lines: list[str] = field(default_factory=list)
    scope: dict[str, Any] = field(default_factory=dict)

    def write(self) -> Callable[[Any], Any]:
        """The function."""
        is_tuple = isinstance(self.result, tuple)
        results = [self.tape.find(x) for x in (self.result if is_tuple else (self.result,))]
        for one in results:
            if one.root.place is not None or one.tensor.dtype != one.root.tensor.dtype:
                raise TapeError("a result that is an argument, or has another dtype")
        self._open_inputs()
        self._open_buffers(results)
        self._write_steps()
        given = ", ".join(map(self._tensor, results))
        self.lines.append(f"return ({given},)" if is_tuple else f"return {given}")
        body = "\n    ".join(self.lines)
        exec(compile(f"def play(call):\n    {body}\n", "<octavo playback>", "exec"), self.scope)
        play: Callable[[Any], Any] = self.scope["play"]
        return play

    def _constant(self, value: Any) -> str:
        """Python for a value: itself, or a name that the function knows."""
        if type(value) in (int, bool, str) or value is None:
            return repr(value)
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def _open_inputs(self) -> None:
        """Find the arguments; leave if two are no longer one, or addresses of another kind."""
        for place, other in self.tape.same:
            self.lines.append(f"if {place} is not {other}: return None")
        used = [one for one in self.tape.used() if one.root.place]
        roots = dict.fromkeys(one.root for one in used)
        shifted = {one.root for one in used if one.offset_bytes}
        aligned: list[str] = []
        others: list[str] = []
        for number, root in enumerate(roots):
            root.name = f"i{number}"
            self.lines.append(f"i{number} = {root.place}")
            self.lines.append(f"p_i{number} = i{number}.data_ptr()")
            is_aligned = root.tensor.data_ptr() % POINTER_ALIGNMENT == 0
            if not is_aligned and root in shifted:
                raise TapeError("a part of an argument that is not aligned")
            (aligned if is_aligned else others).append(f"p_i{number}")
        mask = POINTER_ALIGNMENT - 1
        conditions = [f"({' | '.join(aligned)}) & {mask}"] if aligned else []
        conditions += [f"not {name} & {mask}" for name in others]
        if conditions:
            self.lines.append(f"if {' or '.join(conditions)}: return None")

    def _open_buffers(self, results: Sequence[Operand]) -> None:
        """Make the results, and one buffer for everything that does not outlive the call."""
        # What only kernels see before is made in the shape that the caller sees.
        whole, made = {one.root: one.tensor for one in results if one.is_whole}, self.tape.made
        used = {one.root for one in self.tape.used()}
        if any(one.root not in used and one.tensor.numel() for one in results if one.root in made):
            raise TapeError("a result that no step has written")
        size, device, parts = 0, None, {}
        for number, root in enumerate(self.tape.made):
            root.name = f"m{number}"
            is_result = any(one.root is root for one in results)
            if root.is_tensor or is_result:
                root.tensor = root.tensor if root.is_tensor else whole.get(root, root.tensor)
                self._make(root.name, root.tensor, root.tensor.device)
                self.lines.append(f"p_{root.name} = {root.name}.data_ptr()")
            elif root in used:
                parts[root.name], device = size, root.tensor.device
                size += -(-root.tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        if device is not None:
            self._make("buffer", torch.empty(size, dtype=torch.uint8, device="meta"), device)
            self.lines.append("p_buffer = buffer.data_ptr()")
        self.lines += [f"p_{name} = p_buffer + {start}" for name, start in parts.items()]

    def _make(self, name: str, like: Tensor, device: torch.device) -> None:
        if tuple(like.shape) == (0,) and self.tape.steps:  # nobody asked for this result
            self.lines.append(f"{name} = {self._constant(like)}")
            return
        make = self._constant(torch.empty_strided)
        options = f"dtype={self._constant(like.dtype)}, device={self._constant(device)}"
        self.lines.append(f"{name} = {make}({_sizes(like)}, {options})")

    def _write_steps(self) -> None:
        if any(isinstance(step, Launch) for step in self.tape.steps):
            from octavo.kernels.launch import has_hooks, stream_getter

            self.lines.insert(0, f"if {self._constant(has_hooks)}(): return None")
            self.lines.append(f"stream = {self._constant(stream_getter())}({self.gpu})")
        for number, step in enumerate(self.tape.steps):
            if isinstance(step, Launch):
                self._write_launch(step)
            else:
                self._write_call(step, number)

    def _write_launch(self, launched: Launch) -> None:
        compiled = launched.compiled
        self._constant(compiled)  # kept: it owns what the handles stand for
        handles = (compiled.run, compiled.function, compiled.packed_metadata)
        run, function, metadata = map(self._constant, handles)
        grid = ", ".join(map(str, launched.grid))
        given = ", ".join(map(self._launch_argument, launched.arguments))
        # Triton's hooks, and what it tells them, are None.
        self.lines.append(
            f"{run}({grid}, stream, {function}, {metadata}, None, None, None, {given})"
        )

    def _launch_argument(self, x: Any) -> str:
        if isinstance(x, Described):
            return f"{self._constant(_descriptors_like(x.descriptor))}({_address(x.operand)})"
        return _address(x) if isinstance(x, Operand) else self._constant(x)

    def _write_call(self, called: TorchCall, number: int) -> None:
        for index, root in enumerate(called.results):
            root.name = f"t{number}_{index}"
        given = [self._call_argument(x) for x in called.args]
        given += [f"{name}={self._call_argument(x)}" for name, x in called.kwargs.items()]
        function = self._constant(_BINDINGS.get(called.function, called.function))
        names = [root.name for root in called.results]
        made = f"{', '.join(names)} = " if names else ""
        self.lines.append(f"{made}{function}({', '.join(given)})")
        self.lines += [f"p_{name} = {name}.data_ptr()" for name in names]

    def _call_argument(self, x: Any) -> str:
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(self._call_argument, x))}]"
        return self._tensor(x) if isinstance(x, Operand) else self._constant(x)

    def _tensor(self, one: Operand) -> str:
        """Python for an operand as a tensor."""
        x, whole = one.tensor, one.root.tensor
        first = x.storage_offset() - whole.storage_offset()
        if not first and x.shape == whole.shape and x.stride() == whole.stride():
            return one.root.name
        if first and one.root.place is not None:
            raise TapeError("a part of an argument")
        view = self._constant(torch.as_strided)
        offset = f", {x.storage_offset()}" if first else ""
        return f"{view}({one.root.name}, {_sizes(x)}{offset})"


def _address(one: Operand) -> str:
    name = f"p_{one.root.name}"
    return f"{name} + {one.offset_bytes}" if one.offset_bytes else name


def _sizes(x: Tensor) -> str:
    """Python for a tensor's shape and strides."""
    return f"{tuple(map(int, x.shape))}, {tuple(map(int, x.stride()))}"

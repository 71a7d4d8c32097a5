"""Tapes: what one call of an op makes, launches and leaves to torch, step by step.

Every tensor is traced back to an argument of the call, or to a tensor that the call makes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.internals import internals, require
from octavo.kernels.listening import Launch, listening

with internals("torch"):
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

require("torch.UntypedStorage", "torch._ops.OpOverload")

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
# What no tape can hold: other numbers, or other sizes, each time.
_CHANGING = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


def _ignore(launched: Launch | None) -> None:
    """A launch that nobody needs to hear of."""


class TapeError(Exception):
    """Why there is no tape of a call."""


@dataclass(eq=False)
class Root:
    """A tensor of which others are views: an argument, or one that is made during the call.

    place: Python that finds an argument in `call`. is_tensor: whether a step, or the caller, needs
    more of it than its address. name: in the function that plays the tape.
    """

    tensor: Tensor
    place: str | None = None
    is_tensor: bool = False
    name: str = ""


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of a step, or a result: a view of a root."""

    root: Root
    tensor: Tensor

    @property
    def offset_bytes(self) -> int:
        """From the root's first value to this one's."""
        if self.tensor.numel() == 0 or self.root.tensor.numel() == 0:
            return 0
        return self.tensor.data_ptr() - self.root.tensor.data_ptr()

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the root, in another shape perhaps."""
        x, whole = self.tensor, self.root.tensor
        is_same = x.dtype == whole.dtype and x.numel() == whole.numel()
        return is_same and x.is_contiguous() and whole.is_contiguous()


@dataclass(frozen=True)
class Described:
    """A tensor descriptor among the arguments of a launch."""

    descriptor: Any
    operand: Operand


@dataclass(frozen=True)
class TorchCall:
    """An operator of torch's, its arguments with operands in place of tensors, and its results."""

    function: Any
    args: Any
    kwargs: Any
    results: tuple[Root, ...]


Step = Launch | TorchCall


class Tape(TorchDispatchMode):
    """The steps of what runs inside, while `launch` hears of its launches.

    inputs: the tensors among the arguments, by the Python that finds them in `call`. same: pairs of
    places that held one tensor. made: tensors that were allocated. problem: why the tape cannot be
    played.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.made: list[Root] = []
        self.same: list[tuple[str, str]] = []
        self.problem: str | None = None
        self._device = next(iter(inputs.values())).device
        # Of all tensors that were seen, by id; they are kept so that no id is used again.
        self._operands: dict[int, Operand] = {}
        for place, tensor in inputs.items():
            known = self._operands.get(id(tensor))
            if known is None:
                self._know(Root(tensor, place), tensor)
            else:
                assert known.root.place is not None
                self.same.append((place, known.root.place))

    def find(self, tensor: Tensor) -> Operand:
        """Where a tensor comes from."""
        if id(tensor) not in self._operands:
            raise TapeError("a tensor of unknown origin")
        return self._operands[id(tensor)]

    def used(self) -> Iterator[Operand]:
        """All operands of the steps."""
        for step in self.steps:
            given = step.arguments if isinstance(step, Launch) else (step.args, step.kwargs)
            for x in tree_leaves(given):
                if isinstance(x, Described):
                    yield x.operand
                elif isinstance(x, Operand):
                    yield x

    def launch(self, launched: Launch | None) -> None:
        """Note a launch; None is one that cannot be repeated."""
        if launched is None:
            self.problem = "a launch of nothing that was compiled"
        elif self.problem is None:
            with self._noting("launch"):
                arguments = tuple(map(self._argument, launched.arguments))
                self.steps.append(Launch(launched.compiled, launched.grid, arguments))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with listening(_ignore):  # what it launches is a part of this step
            result = func(*args, **kwargs)
        if self.problem is None:
            with self._noting(str(func)):
                self._note(func, args, kwargs, result)
        return result

    @contextmanager
    def _noting(self, step: str) -> Iterator[None]:
        """Taping only watches: whatever it stumbles over, the call goes on without a tape."""
        try:
            yield
        except Exception as error:
            self.problem = f"{step}: {error}"

    def _know(self, root: Root, tensor: Tensor) -> None:
        self._operands[id(tensor)] = Operand(root, tensor)

    def _argument(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.find(x)
        if hasattr(x, "block_shape") and isinstance(getattr(x, "base", None), Tensor):
            return Described(x, self.find(x.base))
        if any(hasattr(part, "data_ptr") or hasattr(part, "base") for part in tree_leaves(x)):
            raise TapeError(f"memory that is no tensor, in a {type(x).__name__}")
        return x

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func in _ALLOCATIONS:
            self.made.append(Root(result))
            self._know(self.made[-1], result)
            return
        results = (result,) if isinstance(result, Tensor) else result
        if not isinstance(results, tuple | list) or not all(isinstance(x, Tensor) for x in results):
            raise TapeError("expected tensors as results")
        if _CHANGING.intersection(func.tags):
            raise TapeError("what it gives depends on data")
        sources = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        roots = {x.untyped_storage()._cdata: self.find(x).root for x in sources}
        is_view = all(x.untyped_storage()._cdata in roots for x in results)
        if is_view and not func._schema.is_mutable:
            for x in results:
                self._know(roots[x.untyped_storage()._cdata], x)
            return
        args, kwargs = tree_map(self._tensor, (args, kwargs))
        made = [Root(x, is_tensor=True) for x in results if id(x) not in self._operands]
        for root in made:
            if root.tensor.device != self._device:
                raise TapeError("a result on another device")
            self._know(root, root.tensor)
        is_plain = all(str(one.type) == "Tensor" for one in func._schema.returns)
        if made and not (is_plain and len(made) == len(results)):
            raise TapeError("expected results that are new, each a tensor")
        self.steps.append(TorchCall(func, args, kwargs, tuple(made)))

    def _tensor(self, x: Any) -> Any:
        """An argument of one of torch's operators."""
        if not isinstance(x, Tensor):
            return x
        found = self.find(x)
        if found.tensor.dtype != found.root.tensor.dtype:
            raise TapeError("a view with another dtype")
        found.root.is_tensor = True
        return found

"""Patch: changes to objects of other libraries, kept in a list that undoes them.

A `with` block undoes them at its end:

    with Patch() as patch:
        patch.set(module, "forward", faster)
        patch.hook(module.register_forward_hook(count))
        ...
    # The module is as it was.
"""

import enum
import inspect
from dataclasses import dataclass, field
from typing import Any, Protocol, Self


class Handle(Protocol):
    """What torch returns for a hook."""

    def remove(self) -> None:
        """Remove the hook."""


class _Absent(enum.Enum):
    """Stands for an attribute that the object itself did not have; copies of it are itself."""

    ABSENT = enum.auto()


@dataclass
class _Attribute:
    """An attribute that was set, and what it was before."""

    owner: Any
    name: str
    before: object

    def remove(self) -> None:
        if self.before is _Absent.ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


@dataclass
class Patch:
    """Changes that can be undone, the last one first; a `with` block undoes them at its end.

    Steps are data, not closures: a deep copy of a patched object carries a patch of its own parts.
    """

    _steps: list[Handle] = field(default_factory=list)

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of an object, a class or a module; `__class__` is one, too."""
        self._steps.append(_Attribute(owner, name, _own_value(owner, name)))
        setattr(owner, name, value)

    def hook(self, handle: Handle) -> None:
        """Keep the handle of a hook that was registered."""
        self._steps.append(handle)

    def undo(self) -> None:
        """Undo everything; after that the patch is empty."""
        while self._steps:
            self._steps.pop().remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _own_value(owner: Any, name: str) -> object:
    """What an object has under a name by itself; ABSENT if only its class has it, or nobody."""
    by_class = inspect.getattr_static(type(owner), name, None)
    is_computed = hasattr(by_class, "__set__")  # such as a property
    is_part = by_class is None and hasattr(owner, name)  # such as a submodule
    if name in vars(owner) or is_computed or is_part:
        return getattr(owner, name)
    return _Absent.ABSENT

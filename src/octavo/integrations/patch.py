"""Patch: changes to objects of other libraries, kept in a list that undoes them.

    with Patch() as patch:  # the module is as it was at the end
        patch.set(module, "forward", faster)
        patch.hook(module.register_forward_hook(count))

A module may carry patches until somebody restores the model, each under the name of a feature:

    patch = begin_patch(module, "vision_attention")  # an error if it carries one already
    patch.set(module, "forward", faster)
    undo_patches_(model, "vision_attention")  # in all of its modules
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from torch import nn

from octavo.errors import ConfigError

# Where a module carries its patches, by feature.
PATCHES = "octavo_patches"


@dataclass
class Patch:
    """Changes that can be undone, the last one first; a `with` block undoes them at its end.

    A deep copy of a patched object carries a patch of its own parts: what undoes a change is no
    closure, which copies would share.
    is_listed: whether `undo_patches_` names the module; not if the patch only serves others.
    """

    is_listed: bool = True
    _undo: list[Callable[[], object]] = field(default_factory=list)
    _forwards: list[tuple[Any, object]] = field(default_factory=list)  # (owner, what was set)

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of an object, a class or a module; `__class__` is one, too."""
        by_class = inspect.getattr_static(type(owner), name, None)
        is_computed = hasattr(by_class, "__set__")  # such as a property
        is_part = by_class is None and hasattr(owner, name)  # such as a submodule
        if name in vars(owner) or is_computed or is_part:
            self._undo.append(partial(setattr, owner, name, getattr(owner, name)))
        else:  # only its class has it, or nobody
            self._undo.append(partial(delattr, owner, name))
        if name == "forward":
            self._forwards.append((owner, value))
        setattr(owner, name, value)

    def hook(self, handle: Any) -> None:
        """Keep the handle of a hook that was registered, or whatever else has a `remove`."""
        self._undo.append(handle.remove)

    def is_hidden(self) -> bool:
        """Whether somebody has replaced a forward that the patch has set."""
        return any(vars(owner).get("forward") is not value for owner, value in self._forwards)

    def undo(self) -> None:
        """Undo everything; after that the patch is empty."""
        self._forwards.clear()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def begin_patch(module: nn.Module, feature: str, *, is_listed: bool = True) -> Patch:
    """A patch for a feature, which the module carries; ConfigError if it carries one already."""
    carried: dict[str, Patch] = vars(module).setdefault(PATCHES, {})
    if feature in carried:
        raise ConfigError(f"{feature}: expected a model as it was, got one that has been changed")
    carried[feature] = Patch(is_listed)
    return carried[feature]


def is_patched(module: nn.Module, feature: str) -> bool:
    """Whether a module itself carries a patch for this feature."""
    return feature in vars(module).get(PATCHES, ())


def find_patched(model: nn.Module, feature: str) -> dict[str, nn.Module]:
    """The modules of a model that carry a patch for this feature, by name."""
    return {name: module for name, module in model.named_modules() if is_patched(module, feature)}


def undo_patches_(model: nn.Module, feature: str) -> list[str]:
    """Undo a feature's patches in all modules of a model; returns the names of those listed.

    ConfigError, and nothing is undone, if something hides a forward that a patch has set.
    """
    check_patches(model, feature)
    names = []
    for name, module in reversed(find_patched(model, feature).items()):
        patch = vars(module)[PATCHES].pop(feature)
        patch.undo()
        names += [name] if patch.is_listed else []
        if not vars(module)[PATCHES]:
            delattr(module, PATCHES)
    return names[::-1]


def check_patches(model: nn.Module, feature: str) -> None:
    """Raise if something hides a forward that a feature's patches have set."""
    for name, module in find_patched(model, feature).items():
        if vars(module)[PATCHES][feature].is_hidden():
            raise ConfigError(
                f"{name or type(module).__name__}: expected the forward that octavo put there for "
                f"{feature}, got another: undo what replaced it first"
            )

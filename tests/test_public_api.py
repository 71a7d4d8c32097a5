"""The public names: sorted, complete, lazily resolvable, documented and annotated."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import octavo
import octavo.ops
from octavo import errors

PACKAGES = [octavo, octavo.ops]


def names_of(package: ModuleType) -> list[tuple[ModuleType, str]]:
    return [(package, name) for name in package.__all__]


NAMES = [pair for package in PACKAGES for pair in names_of(package)]
IDS = [f"{package.__name__}.{name}" for package, name in NAMES]


def sort_key(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then the rest: the order that ruff (RUF022) gives a written list."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name


def is_public(name: str) -> bool:
    return not name.startswith("_")


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class, or an octavo class above it, defines itself."""
    for owner in cls.__mro__:
        if owner.__module__.split(".")[0] in ("octavo", __name__.split(".")[0]):
            for name, value in vars(owner).items():
                if is_public(name) and is_method(value):
                    yield name, value


def is_method(value: object) -> bool:
    return isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)


def function_of(value: Any) -> Callable[..., Any]:
    """The function inside a method, class method, static method or property."""
    inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return inspect.unwrap(inner)


def undocumented(value: object) -> list[str]:
    """What of a public object has no docstring: "" for itself, names for its methods."""
    if inspect.isclass(value):
        # @dataclass writes the signature where a docstring is missing.
        doc = value.__doc__ or ""
        missing = [] if doc and not doc.startswith(f"{value.__name__}(") else [""]
        return missing + [
            name for name, _ in members(value) if not inspect.getdoc(getattr(value, name))
        ]
    if callable(value):
        return [] if inspect.getdoc(value) else [""]
    return []


def unannotated(value: object) -> list[str]:
    """Parameters and returns of a public object that have no type."""
    functions = {}
    if inspect.isclass(value):
        functions = {name: function_of(member) for name, member in members(value)}
    elif callable(value):
        functions = {"": inspect.unwrap(value)}
    found = []
    for name, function in functions.items():
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        found += [f"{name}({p.name})" for p in parameters if p.annotation is p.empty]
        if signature.return_annotation is signature.empty:
            found.append(f"{name} -> ?")
    return found


def submodules(package: ModuleType) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def own_functions(package: ModuleType) -> set[str]:
    """Public functions named like the file that defines them: what a package of ops offers."""
    found = set()
    for path in Path(package.__path__[0]).glob("[!_]*.py"):
        functions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        found |= {function.name for function in functions if function.name == path.stem}
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_is_sorted_and_has_no_double(package):
    names = set(package.__all__)
    assert list(package.__all__) in (sorted(names), sorted(names, key=sort_key))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_is_what_dir_shows(package):
    shown = set(dir(package))
    assert set(package.__all__) <= shown
    others = {name for name in shown - set(package.__all__) if is_public(name)}
    assert others <= set(submodules(package))


@pytest.mark.parametrize(("package", "name"), NAMES, ids=IDS)
def test_name_resolves_and_is_no_module_in_disguise(package, name):
    value = getattr(package, name)
    if name in submodules(package):
        # Importing package.name must not put the module in the place of the function.
        importlib.import_module(f"{package.__name__}.{name}")
        assert getattr(package, name) is value
    if inspect.ismodule(value):
        assert value.__name__ == f"{package.__name__}.{name}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name


def test_every_op_is_public():
    assert own_functions(octavo.ops) <= set(octavo.ops.__all__)


def test_every_error_is_public():
    own = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert own <= set(octavo.__all__)


@pytest.mark.parametrize(("package", "name"), NAMES, ids=IDS)
def test_name_is_documented(package, name):
    assert undocumented(getattr(package, name)) == []


@pytest.mark.parametrize(("package", "name"), NAMES, ids=IDS)
def test_name_is_annotated(package, name):
    assert unannotated(getattr(package, name)) == []


class Planted:
    """A class with faults."""

    def plain(self, x, *rest: int):
        pass

    @property
    def quiet(self) -> int:
        return 1

    @classmethod
    def good(cls, x: int) -> int:
        """Fine."""
        return x

    def _private(self, x):
        pass


class Inherits(Planted):
    """Documents what was not."""

    def good(self, x: int) -> int:
        return x


def planted(x, y: int = 1):
    pass


def test_planted_faults_are_found():
    assert undocumented(Planted) == ["plain", "quiet"]
    assert unannotated(Planted) == ["plain(x)", "plain -> ?"]
    assert undocumented(planted) == [""]
    assert unannotated(planted) == ["(x)", " -> ?"]
    assert "good" not in undocumented(Inherits)
    assert undocumented(1.5) == unannotated("text") == []


def test_planted_order_is_found():
    names = ["E4M3", "FP8_BLOCK", "Recipe", "__version__", "apply_"]
    assert sorted(reversed(names), key=sort_key) == names

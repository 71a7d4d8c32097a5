"""vLLM's sources as syntax trees: what a name stands for, without importing any of it."""

import ast
import enum
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
# What classes have from bases outside vLLM.
FOREIGN = {"Module": torch.nn.Module, "Enum": enum.Enum, "str": str, "Logger": logging.Logger}


@dataclass(frozen=True, eq=False)
class Module:
    """A file of vLLM."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """What defines each name at the top level, under conditions too; the first that says most.

        A name may be bound in several branches: to a class or an import here, to None there.
        """
        found: dict[str, ast.stmt] = {}
        for node in _statements(self.tree.body):
            for name in _names(node):
                if name not in found or isinstance(found[name], ast.Assign):
                    found[name] = node
        return found


@dataclass(frozen=True, eq=False)
class Class:
    """A class of vLLM."""

    module: Module
    node: ast.ClassDef

    def __str__(self) -> str:
        return f"{self.module.name}.{self.node.name}"

    @cached_property
    def members(self) -> dict[str, ast.stmt]:
        """Its own methods, fields and class attributes, and what its methods set on self."""
        found = {name: node for node in _statements(self.node.body) for name in _names(node)}
        for method in self.node.body:
            for node in ast.walk(method) if isinstance(method, FunctionNode) else ():
                for target in _targets(node):
                    if isinstance(target, ast.Attribute) and _is_name(target.value, "self"):
                        found.setdefault(target.attr, _typed(node, method))
        return found


@dataclass(frozen=True, eq=False)
class Function:
    """A function of vLLM, or a method that `owner` or one of its bases has."""

    module: Module
    node: FunctionNode
    owner: Class | None = None

    def __str__(self) -> str:
        return f"{self.owner or self.module.name}.{self.node.name}"


@dataclass(frozen=True)
class Instance:
    """A value of one of these classes."""

    classes: tuple[Class, ...]


@dataclass(frozen=True)
class Several:
    """A list of such values."""

    item: Instance


@dataclass(frozen=True)
class Bound:
    """A method of a value: its first argument is given."""

    function: Function


class Unknown:
    """A name that exists, of which nothing else is known."""


UNKNOWN = Unknown()
Found = Module | Class | Function | Instance | Several | Bound | Unknown


class Sources:
    """The folder that holds vLLM's package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """A module by its full name."""
        if name not in self._modules:
            path = self.root.joinpath(*name.split("."))
            files = (path / "__init__.py", path.with_suffix(".py"))
            found = next((file for file in files if file.is_file()), None)
            self._modules[name] = None if found is None else Module(name, found)
        return self._modules[name]

    def find(self, module: Module, name: str, depth: int = 0) -> Found | None:
        """What a name of a module stands for; None if it has no such name."""
        node = module.definitions.get(name)
        if node is None or depth > 20:
            return self.module(f"{module.name}.{name}")
        if isinstance(node, ast.ClassDef):
            return Class(module, node)
        if isinstance(node, FunctionNode):
            return Function(module, node)
        if isinstance(node, ast.ImportFrom):
            return self._imported(module, node, name, depth)
        if isinstance(node, ast.AnnAssign):
            return self.type_of(node.annotation, module)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            return self.find(module, node.value.id, depth + 1) or UNKNOWN
        return UNKNOWN

    def _imported(self, module: Module, node: ast.ImportFrom, name: str, depth: int) -> Found:
        origin = node.module or ""
        if node.level:
            is_package = module.path.name == "__init__.py"
            parts = module.name.split(".")
            kept = parts[: len(parts) - node.level + is_package]
            origin = ".".join([*kept, origin] if origin else kept)
        target = self.module(origin)
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        return UNKNOWN if target is None else self.find(target, original, depth + 1) or UNKNOWN

    def mro(self, start: Class) -> Iterator[Class]:
        """A class and its bases within vLLM."""
        yield start
        for base in start.node.bases:
            found = self._resolve(base, start.module)
            if isinstance(found, Class):
                yield from self.mro(found)

    def foreign(self, start: Class) -> set[str]:
        """The names that a class has from bases outside vLLM that are known."""
        names = set(dir(object))
        for one in self.mro(start):
            for base in one.node.bases:
                names |= set(dir(FOREIGN.get(ast.unparse(base).rpartition(".")[2], object)))
        return names

    def member(self, start: Class, name: str) -> tuple[Class, ast.stmt] | None:
        """The class that has a member, and what defines it there."""
        return next(((c, c.members[name]) for c in self.mro(start) if name in c.members), None)

    def method(self, start: Class, name: str) -> Function | None:
        """A method of a class or of its bases."""
        found = self.member(start, name)
        if found is None or not isinstance(found[1], FunctionNode):
            return None
        return Function(found[0].module, found[1], found[0])

    def attribute(self, start: Class, name: str, *, is_instance: bool) -> Found | None:
        """What an attribute of a value, or of the class itself, is; None if there is none."""
        found = self.member(start, name)
        if found is None:
            return UNKNOWN if name in self.foreign(start) else None
        owner, node = found
        if isinstance(node, FunctionNode):
            if is_instance and _decorators(node) & {"property", "cached_property"}:
                return self.type_of(node.returns, owner.module)
            function = Function(owner.module, node, owner)
            is_bound = is_instance and kind(node) != "staticmethod"
            return Bound(function) if is_bound or kind(node) == "classmethod" else function
        if isinstance(node, ast.AnnAssign):
            return self.type_of(node.annotation, owner.module)
        return UNKNOWN

    def type_of(self, annotation: ast.expr | None, module: Module) -> Found:
        """The values that an annotation stands for, None aside."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return _union(
                *(self.type_of(part, module) for part in (annotation.left, annotation.right)),
                *(_is_none(part) for part in (annotation.left, annotation.right)),
            )
        if isinstance(annotation, ast.Subscript):
            word = ast.unparse(annotation.value).rpartition(".")[2]
            inner = self.type_of(annotation.slice, module)
            if word in ("Optional", "ClassVar", "Annotated"):
                return inner
            if word in ("list", "Sequence", "Iterable"):
                return Several(inner) if isinstance(inner, Instance) else UNKNOWN
            if word in ("dict", "tuple", "type", "Mapping", "Literal", "Union", "Callable"):
                return UNKNOWN
            annotation = annotation.value
        found = self._resolve(annotation, module)
        return Instance((found,)) if isinstance(found, Class) else UNKNOWN

    def _resolve(self, expression: ast.expr | None, module: Module) -> Found | None:
        if isinstance(expression, ast.Subscript):  # Base[T]
            expression = expression.value
        return self.find(module, expression.id) if isinstance(expression, ast.Name) else None

    def constructor(self, start: Class) -> inspect.Signature | None:
        """What a class is called with; None where a base outside vLLM says so."""
        if method := self.method(start, "__init__"):
            return signature(method.node, is_bound=True)
        fields: dict[str, inspect.Parameter] = {}
        for one in reversed([*self.mro(start)]):
            for node in one.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    default = inspect.Parameter.empty if node.value is None else None
                    fields[node.target.id] = inspect.Parameter(
                        node.target.id, inspect.Parameter.KEYWORD_ONLY, default=default
                    )
        if not fields and self.foreign(start) != set(dir(object)):
            return None
        return inspect.Signature([*fields.values()])

    def calls_of(self, name: str) -> Iterator[ast.Call]:
        """Every call of an attribute with this name in vLLM's sources."""
        for path in sorted(self.root.rglob("*.py")):
            text = path.read_text()
            if f".{name}(" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == name:
                    yield node


def signature(node: FunctionNode, *, is_bound: bool) -> inspect.Signature:
    """The signature of a function; is_bound: without its first parameter."""
    given, empty = node.args, inspect.Parameter.empty
    positional = [*given.posonlyargs, *given.args]
    made = []
    missing = len(positional) - len(given.defaults)
    for index, argument in enumerate(positional):
        default = empty if index < missing else None
        made.append(_parameter(argument, "POSITIONAL_OR_KEYWORD", default))
    made = made[1:] if is_bound else made
    if given.vararg:
        made.append(_parameter(given.vararg, "VAR_POSITIONAL"))
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        made.append(_parameter(argument, "KEYWORD_ONLY", empty if value is None else None))
    if given.kwarg:
        made.append(_parameter(given.kwarg, "VAR_KEYWORD"))
    return inspect.Signature(made)


def _parameter(
    argument: ast.arg, word: str, default: object = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(argument.arg, getattr(inspect.Parameter, word), default=default)


def refusal(made: inspect.Signature, call: ast.Call) -> str | None:
    """Why a signature does not take the arguments of a call; None if it does."""
    positional = [None for one in call.args if not isinstance(one, ast.Starred)]
    keywords = {one.arg: None for one in call.keywords if one.arg is not None}
    has_all = len(positional) == len(call.args) and len(keywords) == len(call.keywords)
    try:
        (made.bind if has_all else made.bind_partial)(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def kind(node: FunctionNode) -> str:
    """How a method is called: "staticmethod", "classmethod", "property" or "method"."""
    known = ("staticmethod", "classmethod", "property")
    return next((word for word in known if word in _decorators(node)), "method")


def is_abstract(node: ast.stmt) -> bool:
    """Whether subclasses must have this method."""
    return isinstance(node, FunctionNode) and "abstractmethod" in _decorators(node)


def _decorators(node: FunctionNode) -> set[str]:
    return {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | FunctionNode):
        yield node.name
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:
        yield from (one.id for one in _targets(node) if isinstance(one, ast.Name))


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            part
            for target in node.targets
            for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _typed(node: ast.AST, method: FunctionNode) -> ast.stmt:
    """`self.x = x` with the annotation of the parameter x, where it is one."""
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        for argument in [*method.args.args, *method.args.kwonlyargs]:
            if argument.arg == node.value.id and argument.annotation is not None:
                return ast.AnnAssign(node.targets[0], argument.annotation, None, 0)
    return node


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _union(left: Found, right: Found, is_left_none: bool, is_right_none: bool) -> Found:
    if is_left_none or is_right_none:
        return right if is_left_none else left
    if isinstance(left, Instance) and isinstance(right, Instance):
        return Instance((*left.classes, *right.classes))
    return UNKNOWN

"""What octavo's plug-in takes for granted of vLLM, read from our sources and held to vLLM's.

Checked: each name that we import; what we call with these arguments; methods that we override, with
their parameters; attributes of vLLM's values, as far as annotations say whose they are.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from octavo_testkit.vllm_contract.sources import (
    UNKNOWN,
    Bound,
    Class,
    Found,
    Function,
    FunctionNode,
    Instance,
    Module,
    Several,
    Sources,
    is_abstract,
    kind,
    refusal,
    signature,
)

# Our parameters of the type Any: what vLLM hands to them.
HANDED = {
    "vllm_config": ("vllm.config", "VllmConfig"),
    "common": ("vllm.v1.attention.backend", "CommonAttentionMetadata"),
    "engine": ("vllm", "LLMEngine"),
}


def violations(root: Path, files: Sequence[Path]) -> list[str]:
    """What these files of ours expect of vLLM and its sources below `root` do not have."""
    sources, found = Sources(root), []
    texts = [file.read_text() for file in files]
    for file, text in zip(files, texts, strict=True):
        one = _File(sources, ast.parse(text), "\n".join(texts))
        found += [f"{file.name}: {what}" for what in one.violations()]
    return list(dict.fromkeys(found))


class _File:
    """One file of ours."""

    def __init__(self, sources: Sources, tree: ast.Module, ours: str) -> None:
        self.sources, self.tree, self.ours = sources, tree, ours
        self.found: list[str] = []
        self.names: dict[str, Found] = {}

    def violations(self) -> list[str]:
        """What is not as this file expects it."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                self._import(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "vllm":
                        self._import_module(alias)
        for statement in self.tree.body:
            if isinstance(statement, ast.ClassDef):
                self._class(statement)
            elif isinstance(statement, FunctionNode):
                _Function(self, statement, None, {}).check()
        return self.found

    def _import(self, node: ast.ImportFrom) -> None:
        module = self.sources.module(str(node.module))
        if module is None:
            self.found.append(f"no module {node.module}")
            return
        for alias in node.names:
            found = self.sources.find(module, alias.name)
            if found is None:
                self.found.append(f"no {alias.name} in {node.module}")
            self.names[alias.asname or alias.name] = found or UNKNOWN

    def _import_module(self, alias: ast.alias) -> None:
        found = self.sources.module(alias.name)
        if found is None:
            self.found.append(f"no module {alias.name}")
        else:
            self.names[alias.asname or "vllm"] = (
                found if alias.asname else self.sources.module("vllm") or UNKNOWN
            )

    def _class(self, node: ast.ClassDef) -> None:
        bases = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
        found = [self.names.get(b.id) for b in bases if isinstance(b, ast.Name)]
        base = next((one for one in found if isinstance(one, Class)), None)
        methods = {one.name: one for one in node.body if isinstance(one, FunctionNode)}
        if base is not None:
            self._members(node, base, methods)
        known: dict[str, Found] = {}
        own = {*methods, *_set_on_self(methods.values()), *_assigned(node)}
        for name in sorted(methods, key=lambda name: name != "__init__"):
            function = _Function(self, methods[name], base, known)
            function.own = own
            function.check()

    def _members(
        self, node: ast.ClassDef, base: Class, methods: Mapping[str, FunctionNode]
    ) -> None:
        """Methods and class attributes of a class whose base is vLLM's."""
        for name in _assigned(node):
            if self.sources.member(base, name) is None:
                self.found.append(f"{node.name}.{name}: no such attribute in {base}")
        for name, method in methods.items():
            overridden = self.sources.method(base, name)
            if overridden is not None:
                for what in _differences(method, overridden):
                    self.found.append(f"{node.name}.{name}: {what}")
            elif not name.startswith("_") and not self._is_called(name, method):
                self.found.append(f"{node.name}.{name}: {base} has none, and nothing calls it so")
        for one in self.sources.mro(base):
            for name, member in one.members.items():
                is_final = self.sources.member(base, name) == (one, member)
                if is_abstract(member) and is_final and name not in methods:
                    self.found.append(f"{node.name}: {base} is abstract in {name}")

    def _is_called(self, name: str, method: FunctionNode) -> bool:
        """Whether we call a method ourselves, or vLLM calls one of its name with such arguments."""
        if f".{name}(" in self.ours:
            return True
        made = signature(method, is_bound=kind(method) != "staticmethod")
        return any(refusal(made, call) is None for call in self.sources.calls_of(name))


class _Function:
    """One function or method of ours: follows what it knows of vLLM's values, line by line."""

    def __init__(
        self, file: _File, node: FunctionNode, base: Class | None, known: dict[str, Found]
    ) -> None:
        self.file, self.node, self.base, self.known = file, node, base, known
        self.sources, self.own = file.sources, set[str]()
        self.names = {**file.names, **self._parameters()}

    def check(self) -> None:
        """Go through the body."""
        self._body(self.node.body)

    def _parameters(self) -> dict[str, Found]:
        """What vLLM hands to our parameters, by the overridden method or by their names."""
        found: dict[str, Found] = {}
        arguments = [*self.node.args.args, *self.node.args.kwonlyargs]
        for argument in arguments:
            if argument.arg in HANDED:
                module = self.sources.module(HANDED[argument.arg][0])
                one = module and self.sources.find(module, HANDED[argument.arg][1])
                found[argument.arg] = Instance((one,)) if isinstance(one, Class) else UNKNOWN
            else:
                found[argument.arg] = UNKNOWN
        overridden = self.base and self.sources.method(self.base, self.node.name)
        for argument in overridden.node.args.args if overridden else ():
            if argument.annotation is not None and argument.arg in found:
                handed = self.sources.type_of(argument.annotation, overridden.module)
                found[argument.arg] = handed if handed is not UNKNOWN else found[argument.arg]
        return found

    def _say(self, what: str) -> None:
        self.file.found.append(what)

    def _body(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            value = self._visit(node.value)
            target = node.targets[0]
            if isinstance(target, ast.Name):
                self.names[target.id] = value
            elif isinstance(target, ast.Attribute) and _is_self(target.value):
                self.known[target.attr] = value
            else:
                self._visit(target)
        elif isinstance(node, ast.If):
            self._visit(node.test)
            before, narrowed = dict(self.names), self._narrowed(node.test)
            self.names |= narrowed if not _is_negated(node.test) else {}
            self._body(node.body)
            self.names = before
            self._body(node.orelse)
            if _is_negated(node.test) and isinstance(node.body[-1], ast.Return | ast.Raise):
                self.names |= narrowed
        elif isinstance(node, ast.For):
            self._bind(node.target, self._visit(node.iter))
            self._body([*node.body, *node.orelse])
        elif isinstance(node, FunctionNode):
            self._body(node.body)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self._visit(child)
                elif isinstance(child, ast.stmt):
                    self._statement(child)
                elif isinstance(child, ast.excepthandler):
                    self._body(child.body)
                elif isinstance(child, ast.withitem):
                    self._visit(child.context_expr)

    def _bind(self, target: ast.expr, value: Found) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value.item if isinstance(value, Several) else UNKNOWN

    def _narrowed(self, test: ast.expr) -> dict[str, Found]:
        """What `isinstance(name, Class)` says of a name."""
        call = test.operand if isinstance(test, ast.UnaryOp) else test
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "isinstance":
            return {}
        found, name = self._visit(call.args[1]), call.args[0]
        if not isinstance(found, Class) or not isinstance(name, ast.Name):
            return {}
        return {name.id: Instance((found,))}

    def _visit(self, node: ast.expr) -> Found:
        """What an expression is, as far as vLLM's sources tell."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            for generator in node.generators:
                self._bind(generator.target, self._visit(generator.iter))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._visit(child)
            elif isinstance(child, ast.comprehension):
                for test in child.ifs:
                    self._visit(test)
        return UNKNOWN

    def _attribute(self, node: ast.Attribute) -> Found:
        name = node.attr
        if _is_self(node.value):
            return self._of_self(name)
        value = self._visit(node.value)
        if name.startswith("__"):
            return UNKNOWN
        if isinstance(value, Module):
            found = self.sources.find(value, name)
            owners = value.name
        elif isinstance(value, Class):
            found, owners = self.sources.attribute(value, name, is_instance=False), str(value)
        elif isinstance(value, Instance):
            each = [self.sources.attribute(c, name, is_instance=True) for c in value.classes]
            found = next((one for one in each if one is not None), None)
            owners = " or ".join(map(str, value.classes))
        else:
            return UNKNOWN
        if found is None:
            self._say(f"no {name} in {owners}")
        return found or UNKNOWN

    def _of_self(self, name: str) -> Found:
        if name in self.own or self.base is None or name.startswith("__"):
            return self.known.get(name, UNKNOWN)
        found = self.sources.attribute(self.base, name, is_instance=True)
        if found is None:
            self._say(f"no {name} in {self.base}, read from self")
        return found or UNKNOWN

    def _call(self, node: ast.Call) -> Found:
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self._visit(argument)
        called = self._super(node.func) or self._visit(node.func)
        made: inspect.Signature | None = None
        result: Found = UNKNOWN
        if isinstance(called, Class):
            made, result = self.sources.constructor(called), Instance((called,))
        elif isinstance(called, Function | Bound):
            function = called.function if isinstance(called, Bound) else called
            made = signature(function.node, is_bound=isinstance(called, Bound))
            result = self.sources.type_of(function.node.returns, function.module)
            called = function.owner if _returns_self(function) else function
            result = Instance((called,)) if isinstance(called, Class) else result
        if made is not None and (why := refusal(made, node)) is not None:
            self._say(f"{ast.unparse(node.func)}(…) for {called}: {why}")
        return result

    def _super(self, function: ast.expr) -> Found | None:
        """A method by `super().name`."""
        if not isinstance(function, ast.Attribute) or self.base is None:
            return None
        if ast.unparse(function.value) != "super()":
            return None
        found = self.sources.method(self.base, function.attr)
        return None if found is None else Bound(found)


def _differences(ours: FunctionNode, theirs: Function) -> Iterator[str]:
    """What keeps a method of ours from being called as vLLM's is."""
    if kind(ours) != kind(theirs.node):
        yield f"is a {kind(ours)}, {theirs} a {kind(theirs.node)}"
        return
    is_bound = kind(ours) != "staticmethod"
    mine, given = (signature(one, is_bound=is_bound) for one in (ours, theirs.node))
    places, variable = [*mine.parameters], {p.kind for p in mine.parameters.values()}
    for index, (name, parameter) in enumerate(given.parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        found = mine.parameters.get(name)
        if found is None or (parameter.kind != parameter.KEYWORD_ONLY and places[index] != name):
            if parameter.VAR_KEYWORD not in variable and parameter.VAR_POSITIONAL not in variable:
                yield f"does not take {name} of {theirs} in its place"
        elif parameter.default is not parameter.empty and found.default is found.empty:
            yield f"needs {name}, which is optional in {theirs}"
    for name, parameter in mine.parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        takes_any = any(p.kind == p.VAR_POSITIONAL for p in given.parameters.values())
        if is_needed and name not in given.parameters and not takes_any:
            yield f"needs {name}, which {theirs} does not have"


def _assigned(node: ast.ClassDef) -> list[str]:
    """The class attributes that a class sets."""
    targets = [
        target
        for one in node.body
        for target in (
            one.targets
            if isinstance(one, ast.Assign)
            else [one.target]
            if isinstance(one, ast.AnnAssign)
            else []
        )
    ]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _set_on_self(methods: Iterator[FunctionNode] | Sequence[FunctionNode]) -> set[str]:
    nodes = [node for method in methods for node in ast.walk(method)]
    stored = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {node.attr for node in stored if _is_self(node.value)}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _returns_self(function: Function) -> bool:
    return function.owner is not None and ast.unparse(function.node.returns or ast.Constant(0)) in (
        "Self",
        f"'{function.owner.node.name}'",
    )

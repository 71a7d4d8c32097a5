"""Internal names of torch, Triton, transformers and diffusers: listed, checked, missed politely.

`violations` judges one file given as text: planted sources go through the same code as real ones.
"""

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo import internals
from octavo.errors import UnsupportedError

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "octavo"
FILES = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py"))

# Modules that a library documents. Of torch, everything without an underscore is.
DOCUMENTED = {
    "triton": {"", "language"},
    "transformers": {
        *("", "cache_utils", "quantizers", "quantizers.auto", "quantizers.base", "utils"),
        "utils.quantization_config",
    },
    "diffusers": {
        *("", "configuration_utils", "models.activations", "models.modeling_utils"),
        *("models.normalization", "pipelines.pipeline_utils", "quantizers.base"),
        *("quantizers.quantization_config", "utils"),
    },
}
# (file, attribute) -> where it is checked instead.
CHECKED_ELSEWHERE = {
    ("integrations/transformers/fused_vision.py", "_attn_implementation"): "vision.py, before",
    ("integrations/transformers/vision_graphs.py", "_attn_implementation"): "vision.py, before",
    ("ops/check.py", "_dynamo_marked_constant"): "here: the compiler takes seconds to import",
}


def is_private(name: str) -> bool:
    """Whether a name is for its library's own use: _x, but neither __x__ nor an enum's _x_."""
    return name.startswith("_") and not name.endswith("_") and not name.startswith("__")


OWNERS = {name.rpartition(".")[0] for name in internals.INTERNALS}
LISTED = OWNERS | {
    f"{owner}.{name}"
    for owner, _, members in (listed.rpartition(".") for listed in internals.INTERNALS)
    for name in members.split("|")
}
# Private attributes of objects, by their last name.
MEMBERS = {name.rpartition(".")[2] for name in LISTED if is_private(name.rpartition(".")[2])}
# Not of the four libraries: accelerate's hook on a module; the scales of vLLM's attention layers,
# which make test-vllm checks; and Python's own os._exit.
MEMBERS_OF_OTHERS = {"_hf_hook", "_k_scale", "_v_scale", "_exit"}


@cache
def is_module(name: str) -> bool:
    library, *parts = name.split(".")
    place = Path(find_spec(library).submodule_search_locations[0], *parts)
    return place.is_dir() or place.with_suffix(".py").is_file()


def is_internal(name: str) -> bool:
    """Whether a dotted name of a library is one that it does not document."""
    library, *parts = name.split(".")
    if any(map(is_private, parts)):
        return True
    if library not in DOCUMENTED:
        return False
    while parts and not is_module(".".join([library, *parts])):
        parts.pop()
    return ".".join(parts) not in DOCUMENTED[library]


def is_covered(name: str, known: set[str]) -> bool:
    """Whether a dotted name is known, or a public part of something known that has no own row."""
    if name in known:
        return True
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        start = ".".join(parts[:end])
        if start in known:
            return start not in OWNERS and not any(map(is_private, parts[end:]))
    return False


class Reader(ast.NodeVisitor):
    """What of the libraries a file touches, and what it checks."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: dict[str, str] = {}  # a file's own name -> dotted name of a library
        self.octavo: set[str] = set()
        self.own: set[str] = set()
        self.guards: list[str] = []
        self.checked: set[str] = set()
        self.unguarded: list[tuple[str, int]] = []
        self.dotted: list[tuple[str, int]] = []
        self.attributes: list[tuple[str, int]] = []  # of objects, which must be there
        self.asked: list[tuple[str, int]] = []  # of objects, by getattr and such
        for node in ast.walk(tree):
            self._define(node)
        self.visit(tree)

    def _define(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    root = alias.name.split(".")[0]
                    target = alias.name if alias.asname else root
                    if root in internals.SUPPORTED:
                        self.names[alias.asname or root] = target
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    if module.split(".")[0] in internals.SUPPORTED:
                        self.names[alias.asname or alias.name] = f"{module}.{alias.name}"
                    elif module.split(".")[0] == "octavo":
                        self.octavo.add(alias.asname or alias.name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                self.own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                self.own.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                self.own.add(name)

    def visit_With(self, node: ast.With) -> None:
        match node.items[0].context_expr:
            case ast.Call(func=ast.Name(id="internals"), args=[ast.Constant(value=library)]):
                self.guards.append(library)
                self.generic_visit(node)
                self.guards.pop()
            case _:
                self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._imported([alias.name for alias in node.names], node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._imported([f"{node.module}.{alias.name}" for alias in node.names], node.lineno)

    def _imported(self, names: list[str], line: int) -> None:
        for name in names:
            library = name.split(".")[0]
            if library in internals.SUPPORTED and is_internal(name):
                self.dotted.append((name, line))
                if library in self.guards:
                    self.checked.add(name)
                else:
                    self.unguarded.append((name, line))

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="require")):
                for name in (argument.value for argument in node.args):
                    self.checked |= {n for n in LISTED if n == name or n.rpartition(".")[0] == name}
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                self._note(self.asked, name, node.lineno)
        for keyword in node.keywords:
            self._note(self.attributes, keyword.arg or "", node.lineno)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        match node.value:
            case _ if dotted is not None:
                if is_internal(dotted):
                    self.dotted.append((dotted, node.lineno))
                return  # its parts are parts of it
            case ast.Name(id=name) if name in self.octavo:
                pass
            case ast.Name(id="self" | "cls") if node.attr not in MEMBERS:
                pass
            case _:
                self._note(self.attributes, node.attr, node.lineno)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name in MEMBERS:
                self.attributes.append((member.name, member.lineno))  # the library calls it
        self.generic_visit(node)

    def _note(self, found: list[tuple[str, int]], name: str, line: int) -> None:
        if is_private(name) and name not in self.own and not name.startswith("_octavo"):
            found.append((name, line))

    def _dotted(self, node: ast.expr) -> str | None:
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=value, attr=attr):
                owner = self._dotted(value)
                return owner and f"{owner}.{attr}"
        return None


def violations(path: str, source: str) -> list[str]:
    """Internal names that a file touches without the list; `path` is relative to src/octavo."""
    found = Reader(ast.parse(source))
    problems = [f"{line}: import {name} inside internals()" for name, line in found.unguarded]
    for name, line in found.dotted:
        if not is_covered(name, LISTED):
            problems.append(f"{line}: {name} is not in octavo.internals.INTERNALS")
        elif not is_covered(name, found.checked):
            problems.append(f"{line}: {name} is not checked: internals() or require()")
    checked = {name.rpartition(".")[2] for name in found.checked}
    for name, line in found.attributes + found.asked:
        if name not in MEMBERS | MEMBERS_OF_OTHERS:
            problems.append(f"{line}: {name} is not in octavo.internals.INTERNALS")
    for name, line in found.attributes:
        if name in MEMBERS and name not in checked and (path, name) not in CHECKED_ELSEWHERE:
            problems.append(f"{line}: {name} is not checked: require()")
    return [f"{path}:{problem}" for problem in problems]


@pytest.mark.parametrize("path", FILES)
def test_files_touch_internal_names_through_the_list(path):
    assert violations(path, (SRC / path).read_text()) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import torch\ntorch._scaled_mm(a, b)", "torch._scaled_mm is not checked"),
        ("import torch\ntorch._unheard_of(a)", "torch._unheard_of is not in"),
        ("from torch import _scaled_mm", "import torch._scaled_mm inside internals()"),
        (
            "def f():\n    from torch._inductor import config",
            "import torch._inductor.config inside",
        ),
        ("from triton.runtime.jit import JITFunction", "inside internals()"),
        ("import triton.language as tl\ntl.extra.cuda.gdc_wait()", "gdc_wait is not checked"),
        (
            "with internals('triton'):\n    from triton.runtime.cache import get_cache_manager",
            "triton.runtime.cache.get_cache_manager is not in",
        ),
        (
            "with internals('torch'):\n    from triton.runtime.jit import JITFunction",
            "inside internals()",
        ),
        (
            "with internals('triton'):\n    from triton.experimental.gluon import language as gl\n"
            "require('triton.experimental.gluon.language')\ngl.unheard_of()",
            "language.unheard_of is not in",
        ),
        ("from transformers.masking_utils import sdpa_mask", "inside internals()"),
        ("import transformers\ntransformers.integrations.peft.f()", "is not in"),
        (
            "def f(model):\n    return model.config._attn_implementation",
            "is not checked: require()",
        ),
        ("def f(model):\n    model._unheard_of = 1", "_unheard_of is not in"),
        ("def f(model):\n    return getattr(model, '_unheard_of', None)", "_unheard_of is not in"),
        ("f(_unheard_of=False)", "_unheard_of is not in"),
        ("class A(B):\n    def _apply(self, fn): ...", "_apply is not checked"),
        ("class A(B):\n    def f(self): return self._buffers", "_buffers is not checked"),
    ],
)
def test_a_planted_internal_name_is_reported(source, problem):
    assert any(problem in found for found in violations("layers/x.py", source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.is_available()",
        "import triton.language as tl\ntl.dot(a, b)",
        "from transformers import AutoConfig\nAutoConfig.from_pretrained('x')",
        "from transformers.cache_utils import DynamicLayer",
        "with internals('torch'):\n    from torch import _scaled_mm\n_scaled_mm(a, b)",
        "require('torch._scaled_mm')\nimport torch\ntorch._scaled_mm(a, b)",
        "if TYPE_CHECKING:\n    from triton.runtime.jit import JITFunction",
        "require('torch.nn.Module')\nclass A(B):\n    def _apply(self, fn): ...",
        "require('torch.nn.Module._buffers')\ndef f(m):\n    return m._buffers",
        "class A:\n    def __init__(self): self._x = 1\n    def f(self, o): return o._x",
        "def f(model):\n    return getattr(model, '_keep_in_fp32_modules', None)",
        "from octavo.measure import clock\nclock._now()",
    ],
)
def test_what_is_public_or_goes_through_the_list_is_not_reported(source):
    assert violations("layers/x.py", source) == []


def test_every_name_of_the_list_is_used():
    text = "".join((SRC / path).read_text() for path in FILES if path != "internals.py")
    words = {*re.findall(r"\w+", text), "__getitem__"}  # kernel[grid] uses it without its name
    members = {name: {*name.rpartition(".")[2].split("|")} for name in internals.INTERNALS}
    assert {name.split(".")[0] for name in members} == {*internals.SUPPORTED}
    assert [name for name, own in members.items() if not own & words] == []


@pytest.mark.parametrize("library", internals.SUPPORTED)
def test_the_installed_libraries_have_every_name(library):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, about each other
        missing = [
            name
            for name in internals.INTERNALS
            if name.startswith(f"{library}.") and not internals.exists(name)
        ]
    assert missing == []


def sentence(user: str, name: str, library: str) -> str:
    first, end = internals.SUPPORTED[library]
    wanted = f"{library}>={first},<{end}"
    return (
        f"{library} 99.1 has no {name}, needed for {user}: octavo supports {wanted}; "
        f"run: pip install '{wanted}'"
    )


@pytest.fixture
def newer_libraries(monkeypatch):
    """Libraries of a version to come, without a single internal name."""
    fakes = {name: SimpleNamespace(__version__="99.1") for name in internals.SUPPORTED}
    monkeypatch.setattr(internals, "import_module", fakes.__getitem__)
    monkeypatch.setattr(internals, "_resolve", lambda name: SimpleNamespace())
    clear_caches()
    yield
    clear_caches()


def clear_caches() -> None:
    internals.require.cache_clear()
    internals._warn_of_version.cache_clear()


@pytest.mark.parametrize(("name", "user"), internals.INTERNALS.items(), ids=internals.INTERNALS)
@pytest.mark.filterwarnings("ignore:octavo is tested with")
def test_a_name_that_is_gone_is_reported_in_one_sentence(newer_libraries, name, user):
    with pytest.raises(UnsupportedError) as caught:
        internals.require(name)
    assert str(caught.value) == sentence(user, name, name.split(".")[0])


REMOVE_AND_IMPORT = """
import {owner}
del {owner}.{member}
from octavo.errors import UnsupportedError
try:
    import {module}
except UnsupportedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("owner", "member", "module"),
    [
        ("torch._C", "_DisableAutocast", "octavo.ops.register"),
        ("triton.language.core", "_aggregate", "octavo.kernels.attention.gluon_sm90"),
        pytest.param(
            *("diffusers.models.attention_dispatch", "_AttentionBackendRegistry"),
            "octavo.integrations.diffusers.attention",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("transformers.conversion_mapping", "get_model_conversion_mapping"),
            "octavo.integrations.transformers.quantizer",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_module_says_what_it_misses(owner, member, module):
    code = REMOVE_AND_IMPORT.format(owner=owner, member=member, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    library = owner.split(".")[0]
    assert f" has no {owner}.{member}, needed for " in done.stdout
    assert done.stdout.endswith(f"although octavo supports that version: reinstall {library}\n")


@pytest.mark.parametrize(
    "code",
    ["import transformers_that_nobody_has", "from octavo.errors import NoSuchError"],
)
def test_other_missing_names_are_left_alone(code):
    with pytest.raises(ImportError), internals.internals("torch"):
        exec(code)


def test_a_name_that_is_not_listed_is_a_mistake():
    with pytest.raises(KeyError, match="torch.nn.Linear is not in octavo.internals.INTERNALS"):
        internals.require("torch.nn.Linear")


@pytest.mark.parametrize(
    ("library", "version", "is_supported"),
    [
        ("torch", "2.10.3", False),
        ("torch", "2.11.0", True),
        ("torch", "2.15.0+cu130", True),
        ("torch", "2.16.0.dev20260101", False),
        ("triton", "3.9.0", True),
        ("triton", "3.10.0", False),
        ("transformers", "5.22.2", True),
        ("transformers", "6.0.0", False),
        ("diffusers", "0.43.0", False),
    ],
)
def test_versions_out_of_bounds_have_a_warning(library, version, is_supported):
    warning = internals.version_warning(library, version)
    assert (warning is None) == is_supported
    if warning is not None:
        assert f"{library} {version} is installed" in warning
        assert f"run: pip install '{library}>=" in warning


def test_an_untried_version_warns_once_and_runs(monkeypatch):
    clear_caches()
    monkeypatch.setattr("torch.__version__", "2.99.0")
    try:
        with pytest.warns(UserWarning, match="torch 2.99.0 is installed") as caught:
            internals.require("torch._scaled_mm")
            with internals.internals("torch"):
                from torch import _scaled_mm  # noqa: F401
        assert len(caught) == 1
    finally:
        clear_caches()


def requirements() -> dict[str, str]:
    """Package -> its version specifier in pyproject.toml, of the base install and the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    found = {}
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        name, _, rest = line.partition(">=")
        if name in internals.SUPPORTED:
            found[name] = ">=" + rest.partition(";")[0]
    return found


def test_pyproject_has_the_bounds():
    bounds = {n: f">={first},<{end}" for n, (first, end) in internals.SUPPORTED.items()}
    assert requirements() == bounds


@pytest.mark.parametrize("library", internals.SUPPORTED)
def test_constraints_are_within_the_bounds(library):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (version,) = (line.split("==")[1] for line in lines if line.startswith(f"{library}=="))
    assert internals.version_warning(library, version) is None


def test_the_docs_have_the_bounds():
    names = {"triton": "Triton"}
    text = (ROOT / "docs" / "reference" / "support.md").read_text()
    for library, (first, end) in internals.SUPPORTED.items():
        major, minor = end.split(".")
        last = f"{major}.{int(minor) - 1}"
        span = first if first == last else f"{first} to {last}"
        assert f"| {names.get(library, library)} | {span} |" in text

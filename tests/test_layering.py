"""Who may import whom (style guide C2), and other rules of the house that a syntax tree can show.

`violations` judges one file given as text: planted sources go through the same code as real ones.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "octavo"
FILES = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py"))

# To everyone.
OPEN = {"errors", "env", "version", "amounts", "atomic", "brief", "extras", "internals"}
SETTINGS = {"recipe", "settings", "patterns"}  # to layers and all above
LIBRARY = {"numerics", "cache", "reference", "kernels", "ops", "layers", "calibration"}
LIBRARY |= {"calibration.scale_file", "integrations", "serving.engine", "serving.server"}
TELLERS = {f"measure.{name}" for name in ("records", "store", "fit", "roofline", "report")}
TELLERS |= {"measure.statistics"}
RUNNERS = {"measure.rows", "measure.run"}
MEASURERS = {f"measure.{name}" for name in ("bench", "evaluate", "advise")}

# Row -> rows it may import besides itself and OPEN. The longest row that matches decides.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "env": set(),
    "version": set(),
    "amounts": {"errors"},
    "atomic": {"errors"},
    "brief": set(),
    "bounded_regex": set(),
    "internals": {"errors"},
    "extras": {"errors"},
    "patterns": {"bounded_regex"},
    "settings": set(),
    "recipe": {"patterns", "settings"},
    "numerics": set(),
    "cache": {"numerics"},
    "reference": {"numerics", "cache"},
    "kernels": {"numerics", "cache"},
    "ops": {"numerics", "cache", "reference", "kernels"},
    "layers": {"numerics", "cache", "ops"} | SETTINGS,
    "calibration": {"numerics", "cache", "ops", "layers", "calibration.scale_file"}
    | {"calibration.scale_document"}
    | SETTINGS,
    "calibration.scale_document": set(),
    "calibration.scale_file": {"calibration.scale_document"} | SETTINGS,
    "integrations": {"numerics", "cache", "ops", "layers", "calibration", "calibration.scale_file"}
    | {"calibration.scale_document"}
    | SETTINGS,
    "serving": set(),
    "serving.engine": LIBRARY - {"reference", "kernels", "serving.server"} | SETTINGS,
    "serving.server": {"serving.engine", "integrations"} | SETTINGS,
    "testing": {"numerics", "cache", "reference"},
    "measure": set(),
    **dict.fromkeys(TELLERS, TELLERS | SETTINGS | {"measure.rows"}),
    "measure.rows": SETTINGS,
    "measure.run": TELLERS,
    **dict.fromkeys(MEASURERS, LIBRARY | TELLERS | RUNNERS | MEASURERS | SETTINGS | {"testing"}),
    # The embedded models and the story of octavo demo: nobody but cli may import it.
    "demo": LIBRARY | TELLERS | RUNNERS | MEASURERS | SETTINGS | {"measure"},
    "cli": LIBRARY
    | TELLERS
    | RUNNERS
    | MEASURERS
    | SETTINGS
    | {"demo", "measure", "serving", "octavo"},
    "__main__": {"cli"},
    "octavo": LIBRARY | SETTINGS,  # __init__.py: the public names
}

# Row -> packages from outside the standard library.
PACKAGES: dict[str, set[str]] = {
    "settings": {"pydantic", "pydantic_core"},
    "recipe": {"pydantic", "tomli_w"},
    **dict.fromkeys(("numerics", "cache", "reference", "kernels", "ops", "layers"), {"torch"}),
    "calibration": {"torch", "pydantic"},
    "calibration.scale_file": {"pydantic"},
    "integrations": {"torch", "safetensors", "pydantic"},
    "serving.engine": {"torch", "pydantic"},
    "serving.server": {
        *("fastapi", "starlette", "uvicorn", "h11"),
        *("pydantic", "prometheus_client"),
    },
    "testing": {"torch", "pytest"},
    **dict.fromkeys(TELLERS, {"numpy"}),
    "measure.report": {"numpy", "jinja2", "markupsafe", "plotly"},
    **dict.fromkeys((*MEASURERS, "demo"), {"torch", "numpy"}),
    "cli": {"typer", "rich"},
}

# File -> packages that its row does not have.
FILE_PACKAGES: dict[str, set[str]] = {
    "calibration/data.py": {"PIL"},
    "calibration/rows.py": {"datasets", "pyarrow"},
    "integrations/diffusers/image_files.py": {"PIL"},
    "measure/bench/requests.py": {"PIL"},
    "serving/server/input_images.py": {"PIL"},
    "measure/bench/peers.py": {"cudnn"},
    "measure/bench/serving.py": {"httpx"},
    "measure/bench/vllm_worker.py": {"vllm"},
    "demo/chart_*.py": {"PIL"},
    "demo/stages.py": {"PIL"},
    "measure/evaluate/language.py": {"httpx"},
    "measure/evaluate/harness*.py": {"lm_eval"},
    "measure/evaluate/math_worker.py": {"math_verify"},
    "measure/evaluate/question_files.py": {"PIL", "datasets"},
    "measure/evaluate/image_scores.py": {"PIL", "lpips"},
    "serving/engine/llm.py": {"rich"},
    "integrations/transformers/*": {"transformers"},
    "integrations/checkpoints/tensor_files.py": {"gguf"},
    "integrations/transformers/gguf_file.py": {"gguf"},
    "demo/chart_reader*.py": {"tokenizers", "transformers"},
    "demo/model_folder.py": {"safetensors"},
    "demo/small_image*.py": {"diffusers"},
    "demo/retrieval_model.py": {"tokenizers", "transformers"},
    "integrations/diffusers/*": {"diffusers"},
    "integrations/diffusers/tea_cache.py": {"numpy"},
    "integrations/vllm/*": {"vllm"},
    "serving/engine/guided.py": {"llguidance"},
}
TRITON_FILES = ("triton.py", "gluon_*.py", "combine.py", "*primitives.py", "launch.py")

# File -> rows that its row has and it has not.
FILE_FORBIDDEN = {"measure/bench/serving.py": {"serving", "serving.engine", "serving.server"}}

# Modules whose settings are flags, and the words of their help: without torch (test_imports.py), so
# that `--help` stays quick.
FLAG_SETTINGS = {
    "octavo.calibration.settings",
    "octavo.integrations.transformers.encoder_options",
    "octavo.integrations.transformers.tokenizer",
    "octavo.measure.advise.shape",
    "octavo.measure.bench.cases",
    "octavo.measure.bench.requests",
    "octavo.measure.evaluate.harness_requests",
    "octavo.measure.evaluate.image_requests",
    "octavo.measure.evaluate.requests",
    "octavo.measure.rows",
    "octavo.serving.engine.image_request",
    "octavo.serving.server.settings",
}

# Files that import by a name that no syntax tree shows: the lazy public names, commands, and names
# of other libraries that are looked for.
# What ops/select.py imports is in octavo.kernels: tests/ops/test_select.py.
DYNAMIC_IMPORTERS = {
    *("__init__.py", "cli/main.py", "internals.py", "ops/select.py"),
    "integrations/embedded_models.py",
}

MAY_REEXPORT = ("__init__.py", "ops/__init__.py", "integrations/*/__init__.py")
DEVICE_CODE = ("kernels/*/triton.py", "kernels/*/gluon_*.py")
MAX_LINES = 450


@dataclass(frozen=True)
class Import:
    name: str | None  # dotted; None when it is computed at run time
    line: int
    is_deferred: bool  # in a function or under TYPE_CHECKING: importing the file does not run it


def walk(node: ast.AST, is_deferred: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `node`, with whether importing the file leaves it alone."""
    for child in ast.iter_child_nodes(node):
        yield child, is_deferred
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                defers = True
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                defers = not child.orelse
            case _:
                defers = False
        yield from walk(child, is_deferred or defers)


def imports(tree: ast.Module) -> Iterator[Import]:
    """What a file imports: by statement, in functions and under TYPE_CHECKING too, or by call."""
    importers = {"__import__"}
    for node, is_deferred in walk(tree):
        names: list[str | None] = []
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(level=level) if level > 0:
                names.append("." * level)
            case ast.ImportFrom():
                names += [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "importlib":
                    importers |= {alias.asname or alias.name for alias in node.names}
            case ast.Call() if called(node) in importers | {"import_module"}:
                argument = node.args[0] if node.args else None
                literal = argument.value if isinstance(argument, ast.Constant) else None
                names.append(literal if isinstance(literal, str) else None)
        yield from (Import(name, node.lineno, is_deferred) for name in names)


def called(call: ast.Call) -> str:
    """The last name of what is called: "import_module" for importlib.import_module(...)."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def row_of(name: str) -> str | None:
    """The row of an octavo module: "octavo.measure.report.html" -> "measure.report"."""
    _, *parts = name.split(".")
    candidates = [".".join(parts[:length]) for length in (2, 1)]
    return next((row for row in candidates if row in MAY_IMPORT), None)


def row_of_file(path: str) -> str | None:
    """The row of a file: "measure/report/html.py" -> "measure.report"."""
    module = path.removesuffix(".py").removesuffix("__init__").strip("/").replace("/", ".")
    return row_of(f"octavo.{module}") if module else "octavo"


def is_triton_file(path: str) -> bool:
    return path.startswith("kernels/") and any(
        fnmatch(path.split("/")[-1], pattern) for pattern in TRITON_FILES
    )


def imports_triton_file(name: str) -> bool:
    """Whether an octavo module, or the one that a name is imported from, is a Triton file."""
    parts = name.split(".")[1:]
    return any(is_triton_file("/".join(parts[:end]) + ".py") for end in (len(parts), -1))


def packages_of(path: str, row: str) -> set[str]:
    """Packages from outside the standard library that a file may import."""
    packages = set(PACKAGES.get(row, set()))
    for pattern, extra in FILE_PACKAGES.items():
        packages |= extra if fnmatch(path, pattern) else set()
    return packages | {"triton"} if is_triton_file(path) else packages


def why_not(found: Import, path: str, row: str) -> str | None:
    """Why a file may not import this, or None."""
    name = found.name
    if name is None:
        return None if path in DYNAMIC_IMPORTERS else "imports a name that only run time knows"
    if name.startswith("."):
        return "relative import: use absolute imports"
    package = name.split(".")[0]
    if package != "octavo":
        is_allowed = package in sys.stdlib_module_names or package in packages_of(path, row)
        return None if is_allowed else f"{row} may not import {package}"
    target = row_of(name)
    if target is None:
        is_allowed = "octavo" in MAY_IMPORT[row] and found.is_deferred
        return None if is_allowed else f"{name}: import from the defining file"
    allowed = MAY_IMPORT[row] | {row} | (set() if row in OPEN else OPEN)
    if target not in allowed or target in FILE_FORBIDDEN.get(path, set()):
        return f"{row} may not import {target}"
    is_free = target in OPEN | {"cli"} or name.rpartition(".")[0] in FLAG_SETTINGS
    if row == "cli" and not is_free and not found.is_deferred:
        return f"cli may import {target} only inside functions"
    if imports_triton_file(name) and not is_triton_file(path) and not found.is_deferred:
        return f"{name} needs Triton: import it inside a function"
    return None


def reads_environment(tree: ast.Module) -> Iterator[int]:
    """The lines that use os.environ, os.getenv or a relative of theirs."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attr) if attr in names:
                yield node.lineno
            case ast.ImportFrom(module="os") if names & {alias.name for alias in node.names}:
                yield node.lineno


def violations(path: str, source: str) -> list[str]:
    """Every rule of the house that the file breaks; `path` is relative to src/octavo."""
    row = row_of_file(path)
    if row is None:
        return [f"{path}: has no row in MAY_IMPORT"]
    tree = ast.parse(source)
    found = [
        f"{path}:{item.line}: {reason}"
        for item in imports(tree)
        if (reason := why_not(item, path, row)) is not None
    ]
    if path != "env.py":
        found += [
            f"{path}:{line}: only env.py reads the environment" for line in reads_environment(tree)
        ]
    if "utils" in path.removesuffix(".py").split("/"):
        found.append(f"{path}: no utils.py: name the file after what it does")
    is_init = path.split("/")[-1] == "__init__.py"
    if is_init and source.strip() and not any(fnmatch(path, ok) for ok in MAY_REEXPORT):
        found.append(f"{path}: must be empty")
    num_lines = len(source.splitlines())
    if num_lines > MAX_LINES and not any(fnmatch(path, exempt) for exempt in DEVICE_CODE):
        found.append(f"{path}: {num_lines} lines, at most {MAX_LINES}: two things in one file?")
    return found


@pytest.mark.parametrize("path", FILES)
def test_file_keeps_the_rules(path):
    assert violations(path, (SRC / path).read_text()) == []


def test_the_tables_name_only_rows_that_exist():
    named = OPEN.union(*MAY_IMPORT.values(), *FILE_FORBIDDEN.values(), PACKAGES)
    assert named <= MAY_IMPORT.keys()


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("numerics/x.py", "from octavo.ops.attention import attention", "may not import ops"),
        ("numerics/x.py", "from octavo import ops", "may not import ops"),
        ("numerics/x.py", "import octavo.cache.view", "may not import cache"),
        ("numerics/x.py", "import numpy as np", "may not import numpy"),
        ("cache/x.py", "from octavo.recipe import Recipe", "may not import recipe"),
        ("kernels/x/config.py", "from octavo.reference.gemm import mm", "may not import reference"),
        ("reference/x.py", "import octavo.kernels.device", "may not import kernels"),
        ("kernels/x/config.py", "import triton", "may not import triton"),
        ("kernels/x/config.py", "def f():\n    import triton.language", "may not import triton"),
        ("kernels/x/config.py", "import octavo.kernels.x.triton", "inside a function"),
        ("ops/x.py", "from octavo.kernels.x.gluon_sm90 import run", "inside a function"),
        ("ops/x.py", "from octavo.kernels import primitives", "inside a function"),
        ("ops/x.py", "import triton", "may not import triton"),
        ("layers/x.py", "def f():\n    import transformers", "may not import transformers"),
        ("layers/x.py", "from octavo.reference.gemm import mm", "may not import reference"),
        ("layers/x.py", "from octavo.testing.cases import Case", "may not import testing"),
        ("integrations/diffusers/x.py", "import transformers", "may not import transformers"),
        ("integrations/apply.py", "from transformers import PreTrainedModel", "transformers"),
        ("calibration/run.py", "import datasets", "may not import datasets"),
        ("calibration/scale_file.py", "import torch", "may not import torch"),
        ("calibration/scale_file.py", "from octavo.numerics.formats import E4M3", "numerics"),
        ("recipe.py", "import torch", "may not import torch"),
        ("errors.py", "from octavo import env", "may not import env"),
        ("serving/engine/x.py", "import fastapi", "may not import fastapi"),
        ("serving/engine/x.py", "import llguidance", "may not import llguidance"),
        (
            "serving/engine/x.py",
            "import octavo.serving.server.app",
            "may not import serving.server",
        ),
        ("serving/server/x.py", "import torch", "may not import torch"),
        ("measure/report/html.py", "import torch", "may not import torch"),
        ("measure/report/html.py", "import typer", "may not import typer"),
        ("measure/store.py", "from octavo.measure.bench.timing import run", "measure.bench"),
        ("measure/store.py", "import jinja2", "may not import jinja2"),
        ("measure/bench/serving.py", "from octavo.serving.engine import engine", "serving.engine"),
        ("measure/rows.py", "import torch", "may not import torch"),
        ("measure/run.py", "from octavo.measure.bench.timing import run", "measure.bench"),
        ("measure/evaluate/x.py", "from octavo.demo.story import run", "may not import demo"),
        ("integrations/x.py", "def f():\n    import octavo.demo.story", "may not import demo"),
        ("serving/server/x.py", "from octavo.demo import story", "may not import demo"),
        ("cli/x.py", "from octavo.demo.story import run", "only inside functions"),
        ("demo/x.py", "from octavo.cli.main import run", "may not import cli"),
        ("measure/new.py", "from octavo.numerics.formats import E4M3", "may not import numerics"),
        ("cli/x.py", "from octavo.ops.select import select", "only inside functions"),
        ("cli/x.py", "from octavo.serving.server import settings", "only inside functions"),
        ("cli/x.py", "import octavo", "import from the defining file"),
        ("cli/x.py", "def f():\n    import torch", "may not import torch"),
        ("cli/x.py", "if TYPE_CHECKING: pass\nelse: import octavo.ops.select", "only inside"),
        ("cli/x.py", "def f():\n    import octavo.testing.cases", "may not import testing"),
        ("ops/x.py", "import octavo", "import from the defining file"),
        ("ops/x.py", "from octavo import Recipe", "import from the defining file"),
        ("__init__.py", "import torch", "may not import torch"),
        ("__init__.py", "import octavo.cli.main", "may not import cli"),
        ("numerics/x.py", "from . import scales", "relative import"),
        ("numerics/x.py", "def f():\n    from ..ops import x", "relative import"),
        ("nowhere/x.py", "", "has no row"),
        # hidden from a reader who looks only at the top of the file
        (
            "numerics/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import octavo.ops.select",
            "numerics/x.py:3: numerics may not import ops",
        ),
        (
            "numerics/x.py",
            "import importlib\nimportlib.import_module('octavo.ops')",
            "numerics/x.py:2: numerics may not import ops",
        ),
        (
            "layers/x.py",
            "from importlib import import_module as load\ndef f():\n    return load('diffusers')",
            "may not import diffusers",
        ),
        ("layers/x.py", "f = lambda: __import__('vllm')", "may not import vllm"),
        ("layers/x.py", "import importlib as i\ni.import_module('.x', 'octavo')", "relative"),
        ("layers/x.py", "import importlib\nimportlib.import_module(name)", "only run time knows"),
        ("layers/x.py", "import importlib\nimportlib.import_module(f'octavo.{x}')", "only run"),
        # other rules
        ("layers/x.py", "import os\nos.environ['X']", "only env.py reads"),
        ("layers/x.py", "import os\ndef f():\n    return os.getenv('X')", "x.py:3: only env.py"),
        ("layers/x.py", "from os import environ", "only env.py reads"),
        ("layers/utils.py", "", "no utils.py"),
        ("layers/utils/x.py", "", "no utils.py"),
        ("layers/__init__.py", "from octavo.layers.linear import Fp8Linear", "must be empty"),
        ("layers/__init__.py", '"""Layers."""', "must be empty"),
        ("layers/x.py", "x = 1\n" * 451, "451 lines"),
        ("kernels/x/config.py", "x = 1\n" * 451, "451 lines"),
    ],
)
def test_planted_violation_is_reported(path, source, reason):
    found = violations(path, source)
    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("numerics/x.py", "import math\nimport torch.nn\nfrom octavo.errors import ConfigError"),
        ("numerics/x.py", "from octavo.numerics.scales import amax_to_scale"),
        ("numerics/x.py", "from octavo import env, version"),
        ("kernels/x/triton.py", "import triton\nfrom octavo.kernels.primitives import softmax"),
        ("kernels/x/gluon_sm90.py", "from triton.experimental import gluon"),
        ("kernels/x/combine.py", "import triton"),
        ("kernels/gluon_primitives.py", "import triton"),
        ("ops/x.py", "def f():\n    from octavo.kernels.x.triton import run"),
        ("ops/x.py", "from octavo.kernels.x.config import default"),
        ("ops/__init__.py", "from octavo.ops.attention import attention"),
        ("layers/x.py", "from octavo.recipe import Recipe\nfrom octavo.patterns import matches"),
        ("calibration/rows.py", "def f():\n    import datasets"),
        ("calibration/data.py", "def f():\n    import PIL.Image"),
        ("integrations/transformers/attention.py", "from transformers import AttentionInterface"),
        ("integrations/transformers/__init__.py", "import octavo.integrations.transformers.cache"),
        ("serving/engine/guided.py", "def f():\n    import llguidance"),
        (
            "serving/server/app.py",
            "import fastapi\nfrom octavo.serving.engine.engine import Engine",
        ),
        ("measure/bench/timing.py", "import torch\nfrom octavo.testing.cases import Case"),
        ("measure/advise/advise.py", "from octavo.measure.records import Measurement"),
        ("measure/report/html.py", "import jinja2\nfrom octavo.measure import records"),
        ("cli/x.py", "import typer\nfrom octavo.cli.console import out\nfrom octavo import errors"),
        ("cli/x.py", "from octavo.serving.server.settings import ServerSettings"),
        ("cli/x.py", "def f():\n    import octavo\n    from octavo import Recipe, ops"),
        ("cli/x.py", "if TYPE_CHECKING:\n    from octavo.ops.select import Request"),
        ("ops/x.py", "if typing.TYPE_CHECKING:\n    import octavo.kernels.x.triton"),
        ("cli/main.py", "import importlib\nimportlib.import_module(row.module)"),
        ("__init__.py", "import importlib\nfrom octavo.version import __version__"),
        ("__init__.py", "def __getattr__(name): return importlib.import_module(NAMES[name])"),
        ("__main__.py", "from octavo.cli.main import main"),
        ("env.py", "import os\nos.environ.get('OCTAVO_DEBUG')"),
        ("layers/x.py", "import os\nos.replace('a', 'b')\nself.environ"),
        ("layers/__init__.py", "\n"),
        ("kernels/x/triton.py", "x = 1\n" * 900),
        ("layers/x.py", "x = 1\n" * 450),
    ],
)
def test_legal_source_is_not_reported(path, source):
    assert violations(path, source) == []


def find_circle(sources: dict[str, str]) -> list[str]:
    """Files that import each other in a circle, in functions too; none if there is no circle."""
    graph = {}
    for path, source in sources.items():
        names = [found.name for found in imports(ast.parse(source)) if found.name]
        parts = [name.split(".")[1:] for name in names if name.startswith("octavo.")]
        files = {"/".join(part[:end]) + ".py" for part in parts for end in (len(part), -1)}
        graph[path] = {file for file in files if file in sources and file != path}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_import_circle():
    sources = {path: (SRC / path).read_text() for path in FILES}
    assert find_circle(sources) == []


def test_a_circle_is_found():
    sources = {
        "ops/a.py": "from octavo.ops.b import f",
        "ops/b.py": "def f():\n    import octavo.ops.c",
        "ops/c.py": "from octavo.ops import a",
    }
    assert set(find_circle(sources)) == set(sources)
    del sources["ops/b.py"]
    assert find_circle(sources) == []

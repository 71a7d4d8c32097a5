"""What the plug-in uses of vLLM is in vLLM's sources; and the checker says so where it is not."""

import ast
import sys
from pathlib import Path

import pytest

from octavo.integrations.vllm.names import TESTED
from octavo.measure.bench import vllm_engine
from octavo_testkit.vllm_contract.contract import violations
from octavo_testkit.vllm_contract.sources import Sources

ROOT = Path(__file__).parents[3]
OURS = [
    *sorted((ROOT / "src/octavo/integrations/vllm").glob("*.py")),
    ROOT / "src/octavo/measure/bench/vllm_worker.py",
]
BASE = "vllm.v1.attention.backend.AttentionBackend"
MISSING = f"{BASE} has none, and nothing calls it so"
# What each version has in place of what the others have.
DIFFERENCES = {
    "0.26.0": {
        "backend.py: no KVCacheLayout in vllm.v1.kv_cache_interface",
        f"backend.py: OctavoBackend.supported_kv_cache_layouts: {MISSING}",
        f"backend.py: OctavoBackend.supports_device_cpu_query_lens_mismatch: {MISSING}",
    },
    "0.32.0": {
        f"backend.py: OctavoBackend.get_kv_cache_shape: {MISSING}",
        f"backend.py: OctavoBackend.get_required_kv_cache_layout: {MISSING}",
    },
}


def sources_of(version):
    """The folder that the Makefile puts the Python files of a version into."""
    folder = Path(sys.prefix) / f"vllm-{version}"
    assert folder.is_dir(), f"expected vLLM's sources in {folder}: run make {folder}"
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("version", DIFFERENCES)
def test_vllm_has_what_the_plug_in_uses(version):
    assert {*violations(sources_of(version), OURS)} == DIFFERENCES[version]


@pytest.mark.slow
@pytest.mark.parametrize("version", DIFFERENCES)
def test_engines_take_what_benchmarks_ask_for(version):
    """The arguments are a dictionary, which another process gives to EngineArgs."""
    sources = Sources(sources_of(version))
    tree = ast.parse(Path(vllm_engine.__file__).read_text())
    (opener,) = (n for n in tree.body if getattr(n, "name", None) == "open_vllm")
    (asked,) = (n for n in ast.walk(opener) if isinstance(n, ast.Dict))
    names = {ast.literal_eval(key) for key in asked.keys} | {"gpu_memory_utilization"}
    arguments = sources.find(sources.module("vllm"), "EngineArgs")
    assert len(names) > 10
    assert names <= {*sources.constructor(arguments).parameters}


def test_every_tested_version_has_a_contract():
    assert [version.rpartition(".")[0] for version in DIFFERENCES] == [*TESTED]


# A vLLM of three files, and a plug-in that fits it.
VLLM = {
    "__init__.py": """
        import typing
        if typing.TYPE_CHECKING:
            from vllm.base import Backend
        """,
    "config.py": """
        from dataclasses import dataclass

        @dataclass
        class Inner:
            kind: str | None = None

        class Config:
            inner: Inner | None
            def __init__(self, inner: Inner): self.inner = inner; self.size = 3
            @property
            def parts(self) -> "list[Inner]": ...

        def current() -> Config: ...
        """,
    "base.py": """
        from abc import ABC, abstractmethod
        from typing import TYPE_CHECKING
        from enum import Enum
        from torch import nn
        if TYPE_CHECKING:
            from .config import Config

        class Name(Enum):
            ONE = 1

        class Backend(ABC):
            takes: list[str] = []
            @staticmethod
            @abstractmethod
            def name() -> str: ...
            def build(self, config: "Config", fast: bool = False) -> int: ...

        class Layer(nn.Module):
            def __init__(self, prefix: str): self.prefix = prefix

        def run(backend): backend.update(1, 2)
        """,
}
PLUG_IN = """
from typing import Any
from vllm import Backend
from vllm.base import Layer, Name
from vllm.config import Inner, current

class Ours(Backend):
    takes = ["all"]

    @staticmethod
    def name() -> str:
        return Name.ONE.name

    def build(self, config: Any, fast: bool = False, more: int = 0) -> int:
        super().build(config, fast=True)
        inner = config.inner
        return len(inner.kind) + sum(len(one.kind) for one in config.parts)

    def update(self, key: Any, value: Any) -> None:
        self.takes.append(key)

def look(layer: Any, vllm_config: Any) -> Any:
    if not isinstance(layer, Layer):
        return current().inner
    layer.register_parameter("x", None)
    return Inner(kind=layer.prefix), current().size
"""
PLANTED = {
    "no Layers in vllm.base": ("Layer, Name", "Layers, Name"),
    "no module vllm.bases": ("vllm.base import", "vllm.bases import"),
    "no TWO in vllm.base.Name": ("Name.ONE", "Name.TWO"),
    "no kinds in vllm.config.Inner": ("inner.kind)", "inner.kinds)"),
    "no sort in vllm.config.Inner": ("one.kind", "one.sort"),
    "no sizes in vllm.config.Config": (".size", ".sizes"),
    "no name in vllm.base.Layer": ("layer.prefix", "layer.name"),
    "no given in vllm.base.Backend, read from self": ("self.takes", "self.given"),
    "Ours.gives: no such attribute in vllm.base.Backend": ('takes = ["all"]', "gives = 1"),
    "Ours: vllm.base.Backend is abstract in name": ("def name()", "def names()"),
    "Ours.name: is a method, vllm.base.Backend.name a staticmethod": (
        "@staticmethod\n    def name()",
        "def name(self)",
    ),
    "Ours.build: needs fast, which is optional in vllm.base.Backend.build": (
        "fast: bool = False, more",
        "fast: bool, more",
    ),
    "Ours.build: does not take fast of vllm.base.Backend.build in its place": (
        "fast: bool = False, more: int = 0",
        "more: int = 0, fast: bool = False",
    ),
    "Ours.build: needs more, which vllm.base.Backend.build does not have": (
        "fast: bool = False, more: int = 0",
        "fast: bool = False, *, more: int",
    ),
    "Ours.update: vllm.base.Backend has none, and nothing calls it so": (
        "key: Any, value: Any",
        "key: Any",
    ),
    "super().build(…) for vllm.base.Backend.build: got an unexpected keyword argument 'quick'": (
        "fast=True",
        "quick=True",
    ),
    "Inner(…) for vllm.config.Inner: got an unexpected keyword argument 'sort'": (
        "Inner(kind=",
        "Inner(sort=",
    ),
    "current(…) for vllm.config.current: too many positional arguments": (
        "current().size",
        "current(1).size",
    ),
}


def check(folder, plug_in):
    """What the checker says of a plug-in for the small vLLM."""
    (folder / "vllm").mkdir()
    for name, text in VLLM.items():
        (folder / "vllm" / name).write_text(_dedented(text))
    (folder / "ours.py").write_text(plug_in)
    return violations(folder, [folder / "ours.py"])


def _dedented(text):
    return "\n".join(line.removeprefix("        ") for line in text.splitlines())


def test_a_plug_in_that_fits_is_left_alone(tmp_path):
    assert check(tmp_path, PLUG_IN) == []


@pytest.mark.parametrize("said", PLANTED)
def test_a_planted_difference_is_found(tmp_path, said):
    before, after = PLANTED[said]
    assert before in PLUG_IN
    assert f"ours.py: {said}" in check(tmp_path, PLUG_IN.replace(before, after))


def test_the_real_plug_in_is_followed_into_vllms_values(tmp_path):
    """Fields of the config that our sources read are looked for: without them each is named."""
    for name, text in {
        "config/__init__.py": "class VllmConfig:\n    pass\n"
        "def get_current_vllm_config() -> VllmConfig: ...\n",
        "v1/attention/backend.py": "class CommonAttentionMetadata:\n    pass\n",
        "__init__.py": "class LLMEngine:\n    pass\n",
    }.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    found = {*violations(tmp_path, OURS)}
    config, common = "vllm.config.VllmConfig", "vllm.v1.attention.backend.CommonAttentionMetadata"
    assert {
        f"backend.py: no attention_config in {config}",
        f"backend.py: no speculative_config in {config}",
        f"attention.py: no model_config in {config}",
        f"settings.py: no additional_config in {config}",
        f"backend.py: no seq_lens_cpu_upper_bound in {common}",
        "vllm_worker.py: no step in vllm.LLMEngine",
    } <= found

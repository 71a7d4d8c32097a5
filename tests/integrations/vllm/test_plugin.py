"""The entry point: what it registers where, and that importing octavo knows nothing of vLLM."""

import logging
import subprocess
import sys
import tomllib
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from octavo.integrations.vllm import names, plugin

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.5", "0.32.0+cpu", "0.32.1rc2"])
def test_a_tested_version_is_not_warned_of(version):
    assert plugin.untested(version) is None


@pytest.mark.parametrize("version", ["0.27.0", "0.33.0", "0.3.2", "0.320.0", "1.32.0", "dev"])
def test_an_untested_version_is_named(version):
    warning = plugin.untested(version)
    assert warning.startswith(f"octavo leaves vLLM {version} alone")
    assert "0.26.* or 0.32.*" in warning


def test_the_entry_point_is_the_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["octavo"].partition(":")
    assert getattr(import_module(module), name) is plugin.register


def test_octavo_and_its_entry_point_import_nothing_of_vllm():
    code = (
        "import sys, octavo, octavo.integrations.vllm.plugin\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'vllm'])\n"
        "print('octavo.integrations.vllm.linear' in sys.modules, 'torch' in sys.modules)\n"
        "import octavo.integrations.vllm.settings, octavo.integrations.vllm.batch\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'vllm'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "False False", "[]"]


def test_an_untested_version_is_left_alone(monkeypatch, caplog):
    """vLLM with nothing in it but a logger: touching more would fail."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.version", SimpleNamespace(__version__="0.99.1"))
    monkeypatch.setitem(sys.modules, "vllm.logger", SimpleNamespace(init_logger=logging.getLogger))
    with caplog.at_level(logging.INFO):
        plugin.register()
        plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "octavo leaves vLLM 0.99.1 alone" in caplog.text


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_backend_has_a_name_of_its_own_where_names_can_be_added(monkeypatch, is_closed):
    """As vLLM 0.26, whose list is closed, and as later versions."""

    class Names(Enum):
        CUSTOM = None

    def add(name, path):
        monkeypatch.setitem(Names._member_map_, name, SimpleNamespace(name=name))

    registered = {}

    def register_backend(backend, path):
        if isinstance(backend, str):
            add(backend, path)
        registered[backend if isinstance(backend, str) else backend.name] = path

    if not is_closed:
        Names.register = add
    registry = SimpleNamespace(AttentionBackendEnum=Names, register_backend=register_backend)
    name = "vllm.v1.attention.backends.registry"
    for parent in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, registry)
    expected = "CUSTOM" if is_closed else "OCTAVO"
    assert plugin.backend_member().name == plugin.backend_member().name == expected
    assert registered == {expected: "octavo.integrations.vllm.backend.OctavoBackend"}


@pytest.mark.parametrize("is_cuda", [False, True])
def test_a_gpu_is_warned_of(monkeypatch, caplog, is_cuda):
    platform = SimpleNamespace(is_cuda=lambda: is_cuda)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.logger", SimpleNamespace(init_logger=logging.getLogger))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    names.warn_on_gpu()
    assert ("tested on CPUs only" in caplog.text) == is_cuda

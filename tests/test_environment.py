"""octavo.env: the registry, its accessors, and docs/reference/environment.md in agreement."""

import os
import re
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from octavo import env

DOCS = Path(__file__).parents[1] / "docs" / "reference" / "environment.md"


def documented(text: str) -> list[tuple[str, str, str]]:
    """The (name, default, meaning) rows of the table in `text`."""
    return re.findall(r"^\| `(OCTAVO_\w+)` \| `(.*?)` \| (.*) \|$", text, flags=re.MULTILINE)


def test_docs_and_registry_agree():
    registry = [(v.name, v.default, v.meaning) for v in env.VARIABLES]
    assert documented(DOCS.read_text()) == registry


def test_every_name_has_the_prefix_and_appears_once():
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(name.startswith(env.PREFIX) for name in names)


def test_every_variable_of_the_module_is_registered():
    variables = [value for value in vars(env).values() if isinstance(value, env.EnvVar)]
    assert sorted(v.name for v in variables) == sorted(v.name for v in env.VARIABLES)


def test_a_variable_is_frozen():
    with pytest.raises(FrozenInstanceError):
        env.DEBUG.default = "1"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, False),
        ("", False),
        ("0", False),
        ("False", False),
        (" no ", False),
        ("OFF", False),
        ("1", True),
        ("true", True),
        ("yes", True),
        ("anything", True),
    ],
)
def test_is_debug(monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("OCTAVO_DEBUG", value)
    assert env.is_debug() is expected


def test_unknown_variables_are_reported_in_order(monkeypatch):
    assert env.unknown_variables() == ()
    for name in ("OCTAVO_ZEBRA", "OCTAVO_DEBUG", "OCTAVO_CAHCE_DIR", "NOT_OCTAVO_DEBUG"):
        monkeypatch.setenv(name, "1")
    assert env.unknown_variables() == ("OCTAVO_CAHCE_DIR", "OCTAVO_ZEBRA")


def test_unknown_variables_of_a_given_mapping():
    assert env.unknown_variables({"OCTAVO_X": "", "PATH": ""}) == ("OCTAVO_X",)


@pytest.fixture
def triton_cache_dir(monkeypatch):
    """Sets or deletes TRITON_CACHE_DIR, as it was before afterwards."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    return lambda: os.environ.get("TRITON_CACHE_DIR")


def test_compiled_kernels_go_where_they_are_told(monkeypatch, tmp_path, triton_cache_dir):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    env.use_cache_dir()
    assert triton_cache_dir() == env.compiled_dir() == str(tmp_path / "triton")


def test_compiled_kernels_survive_in_the_users_cache(monkeypatch, tmp_path, triton_cache_dir):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    env.use_cache_dir()
    assert triton_cache_dir() == str(tmp_path / ".cache" / "octavo" / "triton")


def test_tritons_folder_counts_if_it_is_the_only_one_named(monkeypatch, triton_cache_dir):
    env.use_cache_dir()
    assert triton_cache_dir() == env.compiled_dir() == "elsewhere"


def test_an_empty_name_means_tritons_own_folder(monkeypatch, tmp_path, triton_cache_dir):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "")
    env.use_cache_dir()
    assert triton_cache_dir() is None
    assert env.compiled_dir() == str(tmp_path / ".triton" / "cache")


def test_threads_sleep_unless_set_otherwise_or_too_late(monkeypatch):
    name = "OMP_WAIT_POLICY"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", object())
    env.let_threads_sleep()  # too late
    assert name not in os.environ
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv(name, "ACTIVE")
    env.let_threads_sleep()
    assert os.environ[name] == "ACTIVE"
    monkeypatch.delenv(name)
    env.let_threads_sleep()
    assert os.environ[name] == "PASSIVE"
    monkeypatch.delenv(name)


@pytest.mark.parametrize("given", [None, "0"])
def test_products_are_fused_unless_triton_is_told_otherwise(monkeypatch, given):
    name = "TRITON_DEFAULT_FP_FUSION"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    env.use_fused_products()
    assert os.environ[name] == (given or "1")

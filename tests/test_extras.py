"""Optional packages: a missing one is named with the command that installs it."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from octavo import extras
from octavo.errors import UnsupportedError
from octavo.extras import EXTRA_OF, explain_missing, install_command, need

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Those that a message may name: dev, docs and clients are for people who have a checkout and run
# its tests, all is a sum of others.
NAMED = {
    extra: [Requirement(text) for text in texts]
    for extra, texts in PROJECT["optional-dependencies"].items()
    if extra not in ("dev", "docs", "clients", "all")
}


def test_every_package_of_the_extras_is_known():
    modules: dict[str, list[str]] = {}
    for module, names in metadata.packages_distributions().items():
        for name in names:
            modules.setdefault(name.lower(), []).append(module)
    for extra, requirements in NAMED.items():
        for requirement in requirements:
            if requirement.name == "octavo":
                continue
            # What is not installed here is imported by its own name, with an underscore.
            own = modules.get(requirement.name, [requirement.name.replace("-", "_")])
            known = [name for name in own if name in EXTRA_OF]
            assert known, f"{extra}: {requirement.name} is not in EXTRA_OF"
            for name in known:
                brought = {r.name for r in NAMED[EXTRA_OF[name]]}
                assert requirement.name in brought, f"{name}: not in the extra {EXTRA_OF[name]}"


def test_every_extra_that_is_named_exists():
    assert set(EXTRA_OF.values()) <= set(NAMED)


@pytest.fixture
def origin(monkeypatch):
    """Set what pip recorded of octavo's installation; None is an index, "" nothing at all."""

    def record(value):
        def distribution(name):
            assert name == "octavo"
            if value == "":
                raise metadata.PackageNotFoundError(name)
            text = None if value is None else json.dumps(value)
            return SimpleNamespace(read_text=lambda file: {"direct_url.json": text}[file])

        monkeypatch.setattr(extras.metadata, "distribution", distribution)

    return record


def folder_url(path: Path, **info: bool) -> dict[str, object]:
    return {"url": path.as_uri(), "dir_info": info}


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "my octavo"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def test_in_the_checkout_the_command_names_the_folder_by_a_dot(origin, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    origin(folder_url(checkout))
    assert install_command("server") == "pip install '.[server]'"
    origin(folder_url(checkout, editable=True))
    assert install_command("server") == "pip install -e '.[server]'"


def test_elsewhere_the_command_names_the_folder(origin, checkout):
    origin(folder_url(checkout))
    assert install_command("data,server") == f"pip install '{checkout}[data,server]'"


def test_a_checkout_that_is_gone_is_asked_for(origin, checkout):
    (checkout / "pyproject.toml").unlink()
    origin(folder_url(checkout))
    assert install_command("server") == "from octavo's checkout, pip install '.[server]'"


def test_source_on_the_path_is_a_checkout(origin, monkeypatch):
    origin("")
    monkeypatch.chdir(ROOT)
    assert install_command("server") == "pip install '.[server]'"


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (None, "pip install 'octavo[server]'"),
        (
            {"url": "file:///tmp/octavo-1-py3-none-any.whl", "archive_info": {}},
            "pip install 'octavo[server] @ file:///tmp/octavo-1-py3-none-any.whl'",
        ),
        (
            {"url": "https://x.org/o.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'octavo[server] @ git+https://x.org/o.git@abc'",
        ),
    ],
    ids=["index", "wheel", "repository"],
)
def test_other_origins(origin, recorded, expected):
    origin(recorded)
    assert install_command("server") == expected


def test_need_names_what_is_missing_and_nothing_else(origin, monkeypatch):
    origin(None)
    monkeypatch.setattr("importlib.util.find_spec", {"PIL": "here"}.get)
    need("reading images", "PIL")
    with pytest.raises(UnsupportedError) as one:
        need("octavo x", "PIL", "fastapi")
    assert str(one.value) == (
        "octavo x needs fastapi, which is not installed: pip install 'octavo[server]'"
    )
    with pytest.raises(UnsupportedError, match=r"fastapi, datasets, which are .*\[data,server\]'"):
        need("octavo x", "fastapi", "datasets")
    with pytest.raises(UnsupportedError, match=r"fastapi, gguf, which are .*\[demo\]'"):
        need("octavo x", "fastapi", "gguf", extra="demo")


def test_an_error_is_explained_by_what_caused_it(origin):
    origin(None)
    missing = ModuleNotFoundError("no", name="accelerate")
    expected = "x needs accelerate, which is not installed: pip install 'octavo[diffusers]'"
    assert explain_missing("x", missing) == expected
    wrapped = ValueError("weights")
    wrapped.__cause__ = missing
    assert explain_missing("x", wrapped) == expected
    # An old transformers without a module is not a missing one, and others are not ours.
    for name in ("transformers.new_module", "somebody", None):
        assert explain_missing("x", ModuleNotFoundError("no", name=name)) is None
    assert explain_missing("x", KeyError("y")) is None


def test_models_by_name_say_that_transformers_is_missing():
    code = """
import sys
for name in ("transformers", "tokenizers"):
    sys.modules[name] = None
import octavo
from octavo.errors import UnsupportedError
for load in (octavo.LLM, lambda name: octavo.load_fp8(None, name)):
    for name in ("some/model", "chart-reader"):
        try:
            load(name)
        except UnsupportedError as error:
            assert "needs transformers, which is not installed: pip install" in str(error), error
            assert "[transformers]'" in str(error), error
        else:
            raise AssertionError("loaded")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

"""The wheel, the sdist and the Dockerfile: what is in them, and that they work."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from octavo import env
from octavo.version import __version__

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
DOCKERFILE = ROOT / "Dockerfile"


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_files() -> set[str]:
    """What the package consists of: every file below src, but for what Python leaves there."""
    src = ROOT / "src"
    files = (path.relative_to(src) for path in src.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="session")
def wheel(dist):
    return dist / f"octavo-{__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_there_is_one_wheel_and_one_sdist_that_the_index_would_take(dist, wheel):
    assert {path.name for path in dist.iterdir()} == {wheel.name, f"octavo-{__version__}.tar.gz"}
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("octavo/")}
    files = (path for path in (ROOT / "results").rglob("*") if path.is_file())
    records = {f"octavo/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert package == source_files() | records
    assert {PurePosixPath(name).parts[0] for name in names - package} == {
        f"octavo-{__version__}.dist-info"
    }


def test_the_package_has_its_data():
    kinds = {"octavo/py.typed", "octavo/measure/advise/gpus.toml", "octavo/kernels/tuned/h200.json"}
    kinds |= {"octavo/measure/report/templates/report.html", "octavo/serving/server/page.html"}
    kinds |= {"octavo/demo/assets/chart_reader/model.safetensors"}
    assert kinds <= source_files()


@pytest.mark.slow
def test_the_sdist_holds_no_leftovers(dist):
    with tarfile.open(dist / f"octavo-{__version__}.tar.gz") as archive:
        names = archive.getnames()
    leftovers = ("__pycache__", ".venv", ".git/", ".mypy_cache", "octavo-demo", "/dist/")
    assert [name for name in names if any(word in f"/{name}/" for word in leftovers)] == []


@pytest.mark.slow
def test_the_installed_wheel_runs(wheel, tmp_path):
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps")
    run(*pip, "--no-index", "--target", tmp_path, wheel)
    options = {"env": {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}, "cwd": tmp_path}
    place = run(sys.executable, "-c", "import octavo; print(octavo.__file__)", **options)
    assert Path(place.strip()).is_relative_to(tmp_path)
    assert run(sys.executable, "-m", "octavo", "--version", **options) == f"octavo {__version__}\n"
    assert "serve" in run(sys.executable, "-m", "octavo", "--help", **options)
    assert run(tmp_path / "bin" / "octavo", "--version", **options).startswith("octavo")


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


@pytest.mark.slow
def test_the_dockerfile_passes_its_linter():
    run(BIN / "hadolint", "--failure-threshold", "style", DOCKERFILE)


def test_the_image_runs_as_nobody_special_and_keeps_its_caches():
    found = dict(instructions())  # of each kind, the last
    assert found["USER"].isdecimal() and found["USER"] != "0"
    settings = dict(re.findall(r"(\w+)=(\S+)", found["ENV"]))
    assert {env.CACHE_DIR.name, "HF_HOME", "TRITON_CACHE_DIR"} <= settings.keys()
    folders = [value for name, value in settings.items() if name.endswith(("_DIR", "_HOME"))]
    assert all(PurePosixPath(folder).is_relative_to(found["VOLUME"]) for folder in folders)


def test_the_image_is_built_of_what_docker_sends():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [
        source
        for name, arguments in instructions()
        if name == "COPY" and "--from" not in arguments
        for source in arguments.split()[:-1]
    ]
    assert "*" in ignored and copied
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    bases = [arguments.split()[0] for name, arguments in instructions() if name == "FROM"]
    assert all(re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", base) for base in bases)


def test_the_image_serves_and_says_whether_it_is_healthy():
    from typer.main import get_command

    from octavo.cli.main import COMMANDS, make_app

    found = dict(instructions())
    program, command, *options = json.loads(found["ENTRYPOINT"])
    assert program == "octavo" and command in get_command(make_app(COMMANDS)).commands
    (serve,) = (row.load() for row in COMMANDS if row.name == command)
    known = {name for option in serve.params for name in option.opts}
    assert set(options[::2]) <= known
    port = options[options.index("--port") + 1]
    assert found["EXPOSE"] == port
    assert f"http://127.0.0.1:{port}/health" in found["HEALTHCHECK"]

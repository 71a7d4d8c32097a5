"""Optional packages: which extra of octavo brings each, and the command that installs it."""

import importlib.util
import json
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from octavo.errors import UnsupportedError

# Extra of pyproject.toml -> what it brings, by importable names. Some come with another package.
_BRINGS = {
    "data": "PIL datasets pyarrow",
    "diffusers": "accelerate diffusers",
    "gguf": "gguf",
    "lm-eval": "lm_eval",
    "math": "math_verify",
    "report": "jinja2 plotly",
    "server": "fastapi h11 httpx llguidance prometheus_client starlette uvicorn",
    "transformers": "huggingface_hub tokenizers transformers",
}
EXTRA_OF = {name: extra for extra, names in _BRINGS.items() for name in names.split()}


def need(what: str, *modules: str, extra: str | None = None) -> None:
    """Raise UnsupportedError with the command that installs what is missing of these modules.

    what: the subject of the sentence, such as "octavo serve". extra: one that brings all of them,
    in place of the extra of each.
    """
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise UnsupportedError(_sentence(what, missing, extra))


def explain_missing(what: str, error: BaseException | None) -> str | None:
    """The same sentence for an error that a missing optional package has caused, else None."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRA_OF:
            return _sentence(what, [error.name])
        error = error.__cause__
    return None


def install_command(extra: str) -> str:
    """The command that adds an extra to octavo, from wherever this octavo was installed.

    pip notes the folder, file or repository that it installed from, and nothing for an index.
    """
    try:
        origin = metadata.distribution("octavo").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # its source is on the path, which nobody installed
        return _from_folder(Path(__file__).parents[2], extra)
    if origin is None:
        return f"pip install 'octavo[{extra}]'"
    match json.loads(origin):
        case {"url": url, "dir_info": info}:
            folder = Path(url2pathname(urlsplit(url).path))
            return _from_folder(folder, extra, is_editable=info.get("editable", False))
        case {"url": url, "vcs_info": {"vcs": vcs, "commit_id": commit}}:
            source = f"{vcs}+{url}@{commit}"
        case other:
            source = other["url"]
    return f"pip install {shlex.quote(f'octavo[{extra}] @ {source}')}"


def _from_folder(folder: Path, extra: str, *, is_editable: bool = False) -> str:
    if not (folder / "pyproject.toml").is_file():  # moved or deleted since
        return f"from octavo's checkout, pip install '.[{extra}]'"
    target = "." if folder == Path.cwd() else str(folder)
    # Without -e, pip would replace an editable installation by a copy.
    return f"pip install {'-e ' if is_editable else ''}{shlex.quote(f'{target}[{extra}]')}"


def _sentence(what: str, missing: Sequence[str], extra: str | None = None) -> str:
    extra = extra or ",".join(sorted({EXTRA_OF[name] for name in missing}))
    verb = "is" if len(missing) == 1 else "are"
    names = ", ".join(missing)
    return f"{what} needs {names}, which {verb} not installed: {install_command(extra)}"

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

# Importable name -> extra of pyproject.toml. Some come with another package of that extra.
EXTRA_OF = {
    "PIL": "data",
    "accelerate": "diffusers",
    "datasets": "data",
    "diffusers": "diffusers",
    "fastapi": "server",
    "gguf": "gguf",
    "h11": "server",
    "httpx": "server",
    "huggingface_hub": "transformers",
    "jinja2": "report",
    "llguidance": "server",
    "lm_eval": "lm-eval",
    "math_verify": "math",
    "plotly": "report",
    "prometheus_client": "server",
    "pyarrow": "data",
    "starlette": "server",
    "tokenizers": "transformers",
    "transformers": "transformers",
    "uvicorn": "server",
}


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

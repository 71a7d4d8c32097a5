"""Every environment variable that octavo reads; nobody else reads os.environ."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "OCTAVO_"


@dataclass(frozen=True)
class EnvVar:
    """One variable: its name, the value it has when unset, and what it does."""

    name: str
    default: str
    meaning: str

    def read(self) -> str:
        """The value now: the environment's, or the default."""
        return os.environ.get(self.name, self.default)


DEBUG = EnvVar(
    "OCTAVO_DEBUG",
    "0",
    "Show the traceback of an error, as `octavo --debug` does. "
    "Empty, `0`, `false`, `no` and `off` mean no, anything else means yes.",
)

CACHE_DIR = EnvVar(
    "OCTAVO_CACHE_DIR",
    "~/.cache/octavo",
    "Folder for compiled kernels, which `octavo warmup` fills and an image can carry. "
    "Unset, a `TRITON_CACHE_DIR` that is set counts; empty means Triton's own folder.",
)

API_KEY = EnvVar(
    "OCTAVO_API_KEY",
    "",
    "Key that `octavo serve` asks its clients for, as its `--api-key` does, but out of sight of "
    "other users of the machine. Empty means none.",
)

VARIABLES = (DEBUG, CACHE_DIR, API_KEY)


def is_debug() -> bool:
    """Whether OCTAVO_DEBUG asks for tracebacks."""
    return DEBUG.read().strip().lower() not in ("", "0", "false", "no", "off")


def of_child() -> dict[str, str]:
    """The environment of this process, to be changed for one that it starts."""
    return dict(os.environ)


def use_cache_dir() -> None:
    """Make OCTAVO_CACHE_DIR the folder in which Triton keeps what it compiles."""
    folder = CACHE_DIR.read()
    is_told_otherwise = "TRITON_CACHE_DIR" in os.environ and CACHE_DIR.name not in os.environ
    if folder and not is_told_otherwise:
        os.environ["TRITON_CACHE_DIR"] = os.path.join(os.path.expanduser(folder), "triton")


def use_fused_products() -> None:
    """Have Triton fuse a product with the sum behind it, as octavo's kernels are tested.

    That is the default until Triton 3.9, which warns where nobody says so; 3.10 will change it.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def compiled_dir() -> str:
    """The folder in which Triton keeps what it compiles, once octavo's ops are there."""
    return os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")


def let_threads_sleep() -> None:
    """Let threads of torch that wait for each other sleep, unless OMP_WAIT_POLICY is set already.

    By default they spin, which on a busy machine takes time from those who work. It counts
    if torch is imported after this.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def unknown_variables(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The names in `environ` that start with OCTAVO_ and mean nothing: most likely misspelt."""
    names = os.environ if environ is None else environ
    known = {variable.name for variable in VARIABLES}
    return tuple(sorted(name for name in names if name.startswith(PREFIX) and name not in known))

"""The state of a calibration that was interrupted, as a file to go on from."""

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.atomic import write_atomically
from octavo.errors import CheckpointError, ConfigError

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """Where the state lies, what it belongs to, and after how many prompts it is written anew.

    key: model, data and settings, in words; a state with another key is refused.
    """

    path: Path
    key: Mapping[str, str]
    save_every: int = 16

    def __post_init__(self) -> None:
        if self.save_every < 1:
            raise ConfigError(f"expected save_every from 1 on, got {self.save_every}")

    def save(self, state: dict[str, Any]) -> None:
        """Write the state; after a crash there is the old one or the new one."""
        content = io.BytesIO()
        torch.save({"version": VERSION, "key": dict(self.key), "state": state}, content)
        write_atomically(self.path, content.getvalue())

    def load(self) -> dict[str, Any] | None:
        """The state, or None where there is no file; ConfigError if it is another run's."""
        if not self.path.exists():
            return None
        try:
            document = torch.load(self.path, map_location="cpu", weights_only=True)
            version, key, state = document["version"], document["key"], document["state"]
        except (OSError, EOFError, LookupError, RuntimeError, TypeError, pickle.UnpicklingError):
            raise CheckpointError(
                f"{self.path}: expected the state of a calibration, got something else; "
                "start afresh"
            ) from None
        differences = [
            f"{name} {self.key.get(name, 'not given')}, got {key.get(name, 'none')}"
            for name in {**self.key, **key}
            if self.key.get(name) != key.get(name)
        ]
        if version != VERSION:
            differences = [f"version {VERSION}, got {version}"]
        if differences:
            raise ConfigError(
                f"{self.path} is the state of another calibration: expected "
                f"{'; '.join(differences)}; start afresh, or ask for the same"
            )
        return dict(state)

    def remove(self) -> None:
        """Forget the state."""
        self.path.unlink(missing_ok=True)


def state_path(scale_save_path: str | os.PathLike[str]) -> Path:
    """Where the state lies until the scale file is written: beside it."""
    path = Path(scale_save_path)
    return path.with_name(f"{path.name}.partial")

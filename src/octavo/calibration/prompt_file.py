"""Prompts of text from a file."""

import os
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.calibration.data import Row, open_file
from octavo.errors import CheckpointError, ConfigError


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """The prompts of a file: its lines that are not blank, or `prompt` of each row of a .jsonl."""
    place = Path(path)
    if not place.is_file():
        raise ConfigError(f"expected a file of prompts, got none at {place}")
    if place.suffix == ".jsonl":
        prompts = [_prompt(row) for row in open_file(place, "prompts").read(0)]
    else:
        try:
            lines = place.read_text("utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{place}: expected text in UTF-8: {error}") from None
        prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{place}: expected prompts, one in a line, got none")
    return prompts


def _prompt(row: Row) -> str:
    content: Any = row.content
    text = content.get("prompt") if isinstance(content, dict) else content
    if not isinstance(text, str) or not text.strip():
        raise CheckpointError(
            f'{row.where}: expected a text, or {{"prompt": "…"}}, got {brief(content)}'
        )
    return text

"""Numbers of tokens and bytes as people write them: 128k, 1M, 141GiB."""

import re

from octavo.errors import ConfigError

_TOKEN_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_tokens(text: str) -> int:
    """A number of tokens such as 4096, 128k (131,072) or 1M (1,048,576)."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmM]?)", text.strip())
    count = 0.0 if found is None else float(found[1]) * _TOKEN_UNITS[found[2].lower()]
    if count < 1 or count != int(count):
        raise ConfigError(f"expected a number of tokens such as 4096, 128k or 1M, got {text!r}")
    return int(count)


def parse_bytes(text: str) -> int:
    """An amount of memory such as 141GiB, 80GB or a plain number of bytes."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise ConfigError(f"expected an amount of memory such as 141GiB or 80GB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])

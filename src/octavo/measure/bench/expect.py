"""One wording for settings that cannot be: what was expected, and what came."""

from collections.abc import Collection

from octavo.errors import ConfigError


def expect(is_right: bool, what: str, got: object) -> None:
    """Raise ConfigError unless it is right."""
    if not is_right:
        raise ConfigError(f"expected {what}, got {got}")


def expect_one_of(what: str, known: Collection[str], *got: str) -> None:
    """Raise ConfigError about the first name that is not known."""
    for name in got:
        if name not in known:
            raise ConfigError(f"expected {what} of {', '.join(known)}; got {name!r}")


def expect_percentiles(percentiles: Collection[float]) -> None:
    """Raise ConfigError unless there are some, from 0 to 100."""
    is_right = bool(percentiles) and all(0 <= p <= 100 for p in percentiles)
    expect(is_right, "percentiles of 0 to 100", list(percentiles))

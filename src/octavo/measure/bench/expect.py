"""One wording for settings that cannot be, and for results that are wrong."""

from collections.abc import Collection

from octavo.errors import ConfigError, UnsupportedError


def expect(is_right: bool, what: str, got: object, where: str = "") -> None:
    """Raise ConfigError unless it is right; where: in which file or row it is."""
    if not is_right:
        raise ConfigError(f"{where and f'{where}: '}expected {what}, got {got}")


def expect_one_of(what: str, known: Collection[str], *got: str) -> None:
    """Raise ConfigError about the first name that is not known."""
    for name in got:
        if name not in known:
            raise ConfigError(f"expected {what} of {', '.join(known)}; got {name!r}")


def expect_percentiles(percentiles: Collection[float]) -> None:
    """Raise ConfigError unless there are some, from 0 to 100."""
    is_right = bool(percentiles) and all(0 <= p <= 100 for p in percentiles)
    expect(is_right, "percentiles of 0 to 100", list(percentiles))


def expect_within(limit: float, error: float, who: str, what: str = "") -> float:
    """The error of a result; UnsupportedError says who is wrong unless it is within its limit.

    what: what was expected, if not a relative error of at most the limit. NaN is within none.
    """
    if not error <= limit:
        wanted = what or f"a relative error of at most {limit}"
        raise UnsupportedError(f"{who} is wrong: expected {wanted}, got {error:.3g}")
    return error

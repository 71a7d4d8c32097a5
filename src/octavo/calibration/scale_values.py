"""What may stand in a scale file: scales, mean keys, counts and texts."""

from octavo.brief import brief
from octavo.errors import ConfigError

MAX_TEXT_LENGTH = 1000
MAX_MEAN = 2.0**127  # a float32 number
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126  # normal float32 numbers, and so are their reciprocals

Scale = float | tuple[float, ...]
KeyMean = tuple[tuple[float, ...], ...]


def checked_scale(key: str, value: object) -> Scale:
    """A scale, or one for each head, if it is such."""
    if type(value) is float and MIN_SCALE <= value <= MAX_SCALE:
        return value  # nearly always; files have up to 100,000 layers
    if not isinstance(value, list | tuple):
        return checked_number(key, value)
    if not value:
        raise ConfigError(f"expected a scale for each head in {key}, got none")
    return tuple(checked_number(key, number) for number in value)


def checked_mean(mean: object, k: Scale) -> KeyMean:
    """The mean key of each head, as many as k has scales, if it is such."""
    rows = mean if isinstance(mean, list | tuple) else ()
    lengths = {len(row) if isinstance(row, list | tuple) else 0 for row in rows}
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(
            "expected k_mean to be a list of head_dim numbers for each head, all of one length, "
            f"got {brief(mean)}"
        )
    if isinstance(k, tuple) and len(k) != len(rows):
        raise ConfigError(f"expected as many heads in k_mean as in k, got {len(rows)}, {len(k)}")
    for number in (number for row in rows for number in row):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not abs(number) <= MAX_MEAN:
            raise ConfigError(
                f"expected k_mean to be finite numbers up to 2^127, got {brief(number)}"
            )
    return tuple(tuple(map(float, row)) for row in rows)


def checked_number(key: str, value: object) -> float:
    """A number that can be a scale or a margin."""
    is_bool = isinstance(value, bool)
    if isinstance(value, int | float) and not is_bool and MIN_SCALE <= value <= MAX_SCALE:
        return float(value)
    raise ConfigError(
        f"expected {key} to be a positive finite number, 2^-126 to 2^126, got {brief(value)}"
    )


def checked_count(key: str, value: object) -> int:
    """A whole number from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"expected {key} to be a whole number from 1 on, got {brief(value)}")
    return value


def check_text(key: str, text: object) -> None:
    """Raise unless `text` is Unicode of 1 to 1000 characters."""
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT_LENGTH:
        raise ConfigError(
            f"expected {key} to be a text of 1 to {MAX_TEXT_LENGTH} characters, got {brief(text)}"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"expected {key} to be Unicode, got a lone surrogate in {brief(text)}"
        ) from None

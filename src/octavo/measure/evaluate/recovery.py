"""What a row recovers of the first one's percentage."""

import math
from collections.abc import Mapping


def recovery(
    own: Mapping[str, float], first: Mapping[str, float], name: str = "score"
) -> dict[str, float]:
    """`recovery_percent` with its standard error, from `NAME_percent`; nothing where that is 0.

    The standard error is that of a quotient of independent numbers. Rows are asked the same, so it
    is rather too large.
    """
    whole = first[f"{name}_percent"]
    if whole == 0:
        return {}
    share = own[f"{name}_percent"] / whole
    values = {"recovery_percent": 100 * share}
    error = f"{name}_standard_error_percent"
    if error in own and error in first:
        spread = math.hypot(own[error], share * first[error]) / whole
        values["recovery_standard_error_percent"] = 100 * spread
    return values

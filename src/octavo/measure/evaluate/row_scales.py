"""Static scales for rows of an evaluation: of a file, or calibrated on what is not measured."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.scale_file import ScaleHeader, ScaleSet, load_scales
from octavo.integrations.transformers.calibrate_text import observe_windows
from octavo.integrations.transformers.text_model import TextModel
from octavo.measure.evaluate.perplexity_rows import PLAIN, Keys, RowName

Watch = Callable[[str, int, int], None]  # (what is done, how much of it so far, of how much)


def given_scales(path: Path | None, rows: Sequence[RowName]) -> dict[Keys, ScaleSet]:
    """The scales of a file, none without one; ConfigError if a row cannot use them."""
    if path is None:
        return {}
    scales = load_scales(path)
    given = {Keys.of(scales): scales}
    for row in rows:
        row.choose(given)
    return given


def calibrate_rows(
    text_model: TextModel,
    windows: Sequence[Tensor],
    rows: Sequence[RowName],
    *,
    data: str,
    margin: float,
    watch: Watch,
) -> dict[Keys, ScaleSet]:
    """Scales by these windows for all kinds of keys that the rows have."""
    kinds = list(dict.fromkeys(row.keys for row in rows))
    total = len(windows) * sum(keys.num_passes for keys in kinds)
    scales: dict[Keys, ScaleSet] = {}
    for keys in kinds:
        num_before = len(windows) * sum(done.num_passes for done in scales)

        def tell(num_windows: int, num_before: int = num_before) -> None:
            watch("calibrating", num_before + num_windows, total)

        scales[keys] = calibration_scales(
            text_model, windows, keys, data=data, margin=margin, on_window=tell
        )
    return scales


def calibration_scales(
    text_model: TextModel,
    windows: Sequence[Tensor],
    keys: Keys = PLAIN,
    *,
    data: str,
    margin: float = 1.5,
    on_window: Callable[[int], None] = lambda num_windows: None,
) -> ScaleSet:
    """Static scales per head by the largest values in these windows, of such keys.

    Rows per tensor take the largest of the heads. on_window is told how many windows are done; all
    passes count.
    """
    settings = CalibrationSettings(granularity="head", margin=margin, **vars(keys))
    header = ScaleHeader(kind="kv_cache", model=text_model.name[:1000], data=data[:1000])
    tokens = [window.tolist() for window in windows]
    seen = observe_windows(text_model.model, tokens, settings, on_window=on_window)
    return seen.result(header).scales

"""Rows of a perplexity table by name: what is done to the model, and with which scales.

    NAME[+rotate][+center][+promote=TILES][+skip=PATTERN]…

NAME is one of `SETTINGS`, or the .json or .toml file of a recipe, which takes +skip alone. TILES is
the recipe's promote_every: a number, or none for one-level accumulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.recipe import Recipe

BASELINE = "baseline"
# Row -> what its recipe says about the cache, besides its format.
SETTINGS: dict[str, dict[str, str]] = {
    "unit": {"scaling": "unit"},
    "tensor": {"scaling": "static"},
    "head": {"granularity": "head", "scaling": "static"},
    "token": {"granularity": "token"},
}
DEFAULT_ROWS = (BASELINE, "tensor", "head", "token")
# What a name may go on with -> the setting.
CHANGES = {"rotate": "rotate_keys", "center": "center_keys"}
PROMOTE, SKIP = "promote=", "+skip="
FORMATS = {"fp8": "e4m3", "fp8_e5m2": "e5m2"}


@dataclass(frozen=True)
class RecipeRow:
    """A row of the table: its name, and what is done to the model; None leaves it as it is."""

    name: str
    recipe: Recipe | None


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What is done to keys before they are stored, and was before their scales were found."""

    rotate_keys: bool = False
    center_keys: bool = False

    @staticmethod
    def of(scales: ScaleSet) -> "Keys":
        """Those of a scale file."""
        has_means = any(layer.k_mean is not None for layer in scales.layers.values())
        return Keys(rotate_keys=scales.header.rotate_keys, center_keys=has_means)

    @property
    def num_passes(self) -> int:
        """How often calibration goes over its data."""
        return 2 if self.center_keys else 1

    def __str__(self) -> str:
        done = [word for word, setting in CHANGES.items() if getattr(self, setting)]
        return f"keys with {' and '.join(done)}" if done else "keys as they are"


PLAIN = Keys()


@dataclass(frozen=True)
class RowName:
    """The parts of a row's name."""

    text: str
    kind: str
    keys: Keys
    skipped: tuple[str, ...]
    promote_every: int | None = 1

    @staticmethod
    def parse(text: str) -> "RowName":
        """ConfigError unless it is the name of a row."""
        front, *skipped = text.split(SKIP)
        if Path(front).suffix in (".json", ".toml"):
            return RowName(text, front, PLAIN, tuple(skipped))
        kind, *words = front.split("+")
        if kind not in (BASELINE, *SETTINGS):
            known = ", ".join((BASELINE, *SETTINGS))
            raise ConfigError(
                f"expected a row, one of {known}, or a recipe's .json or .toml file, got {kind!r}"
            )
        if kind == BASELINE and (words or skipped):
            raise ConfigError(
                f"{text}: rotated, centered, promoted and skipped are for rows in FP8, not for "
                f"{BASELINE}"
            )
        tiles = [word for word in words if word.startswith(PROMOTE)]
        changes = [word for word in words if word not in tiles]
        unknown = [word for word in changes if word not in CHANGES]
        if unknown or len(set(changes)) != len(changes) or len(tiles) > 1:
            raise ConfigError(
                f"{text}: expected NAME[+rotate][+center][+promote=TILES][+skip=PATTERN]…, each of "
                f"the first three once, got {'+'.join(words)}"
            )
        if kind == "unit" and "center" in changes:
            raise ConfigError(f"{text}: center needs calibrated means: tensor, head or token")
        keys = Keys(**{CHANGES[word]: True for word in changes})
        promote_every = _read_tiles(text, tiles[0].removeprefix(PROMOTE)) if tiles else 1
        return RowName(text, kind, keys, tuple(skipped), promote_every)

    @property
    def needs_scales(self) -> bool:
        """Whether the row takes scales, or the means of keys, that are not its own."""
        is_static = SETTINGS.get(self.kind, {}).get("scaling") == "static"
        return is_static or self.keys.center_keys

    def choose(self, scales: Mapping[Keys, ScaleSet]) -> ScaleSet | None:
        """The scales of keys such as this row's, None if it needs none; ConfigError without any."""
        if not self.needs_scales:
            return None
        found = scales.get(self.keys)
        if found is None and self.kind == "token":
            # Only the means are used, which are those of keys before they are rotated.
            found = scales.get(Keys(rotate_keys=not self.keys.rotate_keys, center_keys=True))
        if found is None:
            got = ", ".join(map(str, scales)) or "none"
            raise ConfigError(f"expected scales for the row {self.text}, of {self.keys}, got {got}")
        return found


def _read_tiles(text: str, tiles: str) -> int | None:
    if tiles == "none":
        return None
    if not tiles.isdecimal() or int(tiles) < 1:
        raise ConfigError(f"{text}: expected promote=none or a number of tiles, got {tiles!r}")
    return int(tiles)


def check_rows(names: Sequence[str]) -> list[RowName]:
    """The parts of these names; ConfigError unless they are different rows."""
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"expected different rows, got {list(names)}")
    return [RowName.parse(name) for name in names]


def recipe_rows(
    names: Sequence[str],
    scales: Mapping[Keys, ScaleSet],
    *,
    dtype: str = "baseline",
    kv_cache_dtype: str = "fp8",
) -> list[RecipeRow]:
    """The rows with these names; dtype: what the baseline is called."""
    if kv_cache_dtype not in FORMATS:
        raise ConfigError(
            f"expected a KV cache dtype, one of {', '.join(FORMATS)}, got {kv_cache_dtype!r}"
        )
    rows = []
    for row in check_rows(names):
        if row.kind == BASELINE:
            rows.append(RecipeRow(dtype, None))
        elif row.kind in SETTINGS:
            recipe = _recipe(row, scales, FORMATS[kv_cache_dtype])
            rows.append(RecipeRow(f"{kv_cache_dtype} {row.text}", recipe))
        else:
            recipe = Recipe.load(row.kind)
            if row.skipped:
                recipe = recipe.replace(skip_layers=[*recipe.skip_layers, *row.skipped])
            rows.append(RecipeRow(row.text, recipe))
    return rows


def _recipe(row: RowName, scales: Mapping[Keys, ScaleSet], format: str) -> Recipe:
    settings: dict[str, Any] = {"format": format, **SETTINGS[row.kind], **vars(row.keys)}
    given = row.choose(scales)
    return Recipe(
        kv_cache=settings,
        skip_layers=list(row.skipped),
        promote_every=row.promote_every,
        scales=None if given is None else given.to_dict(),
    )

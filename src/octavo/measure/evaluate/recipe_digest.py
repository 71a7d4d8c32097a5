"""What a row's name does not say of its recipe, as a few letters: for records that are resumed."""

import hashlib
import json

from octavo.calibration.scale_file import load_scales
from octavo.recipe import Recipe


def recipe_digest(recipe: Recipe | None, calibration: object = None) -> str | None:
    """Of a recipe and its scales, since files may change; None of a row without a recipe.

    calibration: what scales that were found in the same run depend on, in place of their values:
    by the same data they are the same, but for what a GPU rounds otherwise.
    """
    if recipe is None:
        return None
    document = json.loads(recipe.to_json())
    if calibration is not None:
        document["scales"] = calibration
    elif isinstance(recipe.scales, str):
        document["scales"] = load_scales(recipe.scales).to_dict()
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]

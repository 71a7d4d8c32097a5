"""Recipes for as long as something is measured, linear layers too; the model stays as it was."""

import pytest
import torch

pytest.importorskip("transformers")


from octavo import Recipe
from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.layers.linear import Fp8Linear
from octavo.measure.evaluate import perplexity
from octavo.measure.evaluate.language import (
    applied,
    local_participants,
)
from octavo.measure.evaluate.perplexity import Reading
from octavo.measure.evaluate.requests import LanguageRequest
from octavo.measure.rows import Row
from octavo_testkit.models.text_models import make_decoder, make_prompts

CACHE = Recipe(kv_cache={"scaling": "unit"})
RECIPES = {
    "linear": Recipe(linear="fp8", ignored_layers=["mlp"]),
    "cache": CACHE,
    "both": CACHE.replace(linear="fp8"),
}
PROMPT = make_prompts(1, 20, 1)["input_ids"]


def logits(model):
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_model_is_left_as_it_was(recipe):
    model = make_decoder("llama")
    before, implementation = logits(model), model.config._attn_implementation
    with applied(model, recipe) as own:
        has_linear = any(isinstance(part, Fp8Linear) for part in own.modules())
        assert has_linear == (recipe.linear is not None)
        assert not torch.equal(logits(own), before)
        assert not any(isinstance(part, Fp8Linear) for part in model.modules())
    assert torch.equal(logits(model), before)
    assert model.config._attn_implementation == implementation
    with applied(model, None) as own:
        assert own is model
    with pytest.raises(ConfigError), applied(model, Recipe()):
        pass


def test_rows_with_fp8_linear_layers_are_evaluated():
    text_model = TextModel("a", make_decoder("llama"), None)
    before = logits(text_model.model)
    rows = [Row.of("plain", None), Row.of("linear", RECIPES["linear"])]
    rows.append(Row.of("both", RECIPES["both"]))
    windows, reading = [PROMPT[0]], Reading(chunk=10)
    found = perplexity.evaluate(text_model, windows, rows, reading, data="x", command="c")
    assert len({record.values["perplexity"] for record in found}) == 3
    request = LanguageRequest(recipe=("baseline", "linear+ignore=mlp"))
    named = TextModel("a", text_model.model, _Words())

    def count(own, item):
        return sum(isinstance(part, Fp8Linear) for part in own.model.modules()) > 0

    found = []
    for row in local_participants(request, named, {}, count, calibration=None):
        with row.open() as ask:
            found += ask(["x"])
    assert found == [False, True]
    assert torch.equal(logits(text_model.model), before)


class _Words:
    eos_token_id = None

"""Recipes for as long as something is measured, linear layers too; the model stays as it was."""

import pytest
import torch

pytest.importorskip("transformers")


from octavo import Recipe
from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.layers.linear import Fp8Linear
from octavo.measure.evaluate import language, perplexity
from octavo.measure.evaluate.language import (
    Prompt,
    applied,
    local_participants,
    model_about,
    participants,
)
from octavo.measure.evaluate.perplexity import Reading
from octavo.measure.evaluate.requests import ServedRequest
from octavo.measure.rows import Row
from octavo.measure.run import Progress, run_workload
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


def test_rows_with_fp8_linear_layers_are_evaluated(monkeypatch):
    text_model = TextModel("a", make_decoder("llama"), None)
    before = logits(text_model.model)
    rows = [Row.of("plain", None), Row.of("linear", RECIPES["linear"])]
    rows.append(Row.of("both", RECIPES["both"]))
    windows, reading = [PROMPT[0]], Reading(chunk=10)
    found = run_workload(
        local_participants(rows, text_model.model, model_about(text_model)),
        perplexity.make_workload(windows, reading, "x", "c"),
    )
    assert len({record.values["perplexity"] for record in found}) == 3
    request = ServedRequest(recipe=("baseline", "linear+ignore=mlp"))
    named = TextModel("a", text_model.model, None)

    def count(own, content, **options):
        return sum(isinstance(part, Fp8Linear) for part in own.model.modules()) > 0

    monkeypatch.setattr(language, "answer_text", count)
    progress, found = Progress(lambda *args: None, "answering", 1), []
    for row in participants(request, named, {}, progress, calibration=None):
        with row.open() as ask:
            found += ask([Prompt("x", 1, 1)])
    assert found == [False, True]
    assert torch.equal(logits(text_model.model), before)

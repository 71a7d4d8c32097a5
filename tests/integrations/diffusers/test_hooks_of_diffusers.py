"""What diffusers does to attention layers after `apply_`: scores skipped, processors replaced."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers.hooks import LayerSkipConfig, apply_layer_skip

from octavo import Recipe, apply_, restore_
from octavo.integrations.diffusers.attention import find_layers
from octavo.numerics.error import relative_rms
from octavo_testkit.models.fused_models import make, run, scales_of

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.mark.parametrize(
    ("family", "blocks"), [("qwen", "transformer_blocks"), ("z_image", "layers")]
)
def test_skipped_scores_are_skipped(family, blocks):
    """As perturbed guidance asks for: the values are the result, in FP8 as in BF16."""
    model, inputs = make(family, torch.bfloat16)
    plain, _ = make(family, torch.bfloat16)
    apply_(model, Recipe(attention="fp8"))
    before = run(model, inputs)
    options = {"skip_attention": False, "skip_ff": False, "skip_attention_scores": True}
    for each in (model, plain):
        apply_layer_skip(each, LayerSkipConfig(indices=[0], fqn=blocks, **options))
    after, expected = run(model, inputs), run(plain, inputs)
    assert relative_rms(after, expected) < 0.03 < relative_rms(after, before)


@pytest.mark.parametrize("scaling", ["dynamic", "static"])
def test_processors_that_were_all_replaced(scaling):
    """As loading an IP-Adapter does: `restore_` finds its layers, and no hook is there twice."""
    model, inputs = make("flux", torch.bfloat16)
    before = run(model, inputs)
    recipe = Recipe(attention="fp8")
    if scaling == "static":
        recipe = Recipe(attention={"scaling": "static"}, scales=scales_of(model, inputs))
    apply_(model, recipe)
    layers = find_layers(model)
    for layer in layers.values():
        layer.processor = type(layer.processor)()
    apply_(model, recipe)
    assert {len(layer._forward_pre_hooks) for layer in layers.values()} == {scaling == "static"}
    for layer in layers.values():
        layer.processor = type(layer.processor)()
    assert restore_(model).layers == {"attention": list(layers)}
    assert not any(layer._forward_pre_hooks for layer in layers.values())
    assert torch.equal(run(model, inputs), before)

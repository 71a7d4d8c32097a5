"""LoRA adapters that diffusers adds to layers in FP8."""

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from peft import LoraConfig
from safetensors.torch import load_file

from octavo import Recipe, apply_
from octavo.numerics.error import relative_rms
from octavo_testkit.models.fused_models import make, run

pytestmark = pytest.mark.usefixtures("without_gradients")

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def add_adapter_(model):
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False)
    model.add_adapter(config, adapter_name="style")
    return model


@pytest.mark.parametrize("attention", [None, "fp8"])
def test_an_adapter_is_loaded_into_a_quantized_model(attention, tmp_path):
    plain, inputs = make("flux", torch.bfloat16)
    add_adapter_(plain).save_lora_adapter(tmp_path, adapter_name="style")
    model, _ = make("flux", torch.bfloat16)
    apply_(model, Recipe(linear="fp8", attention=attention))
    before = run(model, inputs)
    weights = tmp_path / "pytorch_lora_weights.safetensors"
    model.load_lora_adapter(load_file(weights), prefix=None, adapter_name="style")
    adapters = [x for name, x in model.named_parameters() if "lora" in name]
    assert adapters and {x.dtype for x in adapters} == {torch.bfloat16}
    after = run(model, inputs)
    assert relative_rms(after, run(plain, inputs)) < 0.1 < 0.3 < relative_rms(after, before)


def test_layers_without_a_bias_know_the_dtype_of_their_model():
    model, inputs = make("z_image", torch.bfloat16)
    apply_(model, Recipe(linear="fp8"))
    add_adapter_(model)
    layer = model.layers[0].attention.to_q
    assert layer.base_layer.bias is None
    assert layer.lora_A["style"].weight.dtype == torch.bfloat16
    assert torch.isfinite(run(model, inputs)).all()

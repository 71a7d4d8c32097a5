"""Checkpoints with FP8 linear layers as other projects write them, made from a small decoder."""

import copy
import json

import torch
from safetensors.torch import save_file

from octavo.integrations.linear import plan_linear
from octavo.numerics.granularity import PerChannel, PerTensor, parse_granularity
from octavo.numerics.quantize import quantize
from octavo_testkit.models.text_models import make_decoder

# Several blocks of 128, with partial ones, and sizes that are no multiples of 16.
SIZES = {"hidden_size": 160, "intermediate_size": 280, "head_dim": 40, "num_hidden_layers": 2}
INPUT_SCALE = 0.02


def make_plain(**changes):
    return make_decoder("llama", **{**SIZES, **changes})


def compressed_tensors(weights="channel", inputs="token", *, dynamic=True, **changes):
    """The quantization_config of compressed-tensors; inputs: None for weights alone."""
    e4m3 = {"num_bits": 8, "type": "float", "symmetric": True}
    weight_scheme = {**e4m3, "strategy": weights, "dynamic": False, "observer": "minmax"}
    if weights == "block":
        weight_scheme["block_structure"] = [128, 128]
    scheme = None
    if inputs is not None:
        scheme = {**e4m3, "strategy": inputs, "dynamic": dynamic, "observer": None}
        scheme |= {"group_size": 128} if inputs == "group" else {}
    group = {"targets": ["Linear"], "weights": weight_scheme, "input_activations": scheme}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **changes,
    }


BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
TENSOR_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
HF_QUANT_CONFIG = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": MODELOPT}


def fp8_tensors(
    model,
    weight,
    *,
    is_static=False,
    scale_name="weight_scale",
    input_name="input_scale",
    one_shape=(),
):
    """The state dict of a model in BF16, linear layers in FP8 with scales beside them."""
    tensors = {name: x.to(torch.bfloat16) for name, x in model.state_dict().items()}
    granularity = parse_granularity(weight)
    for layer in plan_linear(model).chosen:
        plain = model.get_submodule(layer).weight.detach()
        quantized = quantize(plain, granularity)
        scale = quantized.scale
        match granularity:
            case PerTensor():
                scale = scale.reshape(one_shape)
            case PerChannel():
                scale = scale[:, None]
        tensors[f"{layer}.weight"] = quantized.data
        tensors[f"{layer}.{scale_name}"] = scale.contiguous()
        if is_static:
            tensors[f"{layer}.{input_name}"] = torch.tensor(INPUT_SCALE).reshape(one_shape)
    return tensors


def write(folder, model, tensors, quantization_config=None, hf_quant_config=None):
    """Write a folder as from_pretrained reads it; returns it."""
    folder.mkdir(exist_ok=True)
    config = {**model.config.to_dict(), "dtype": "bfloat16"}
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))
    if hf_quant_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def dequantized(model, tensors, settings, *, rounds_inputs):
    """The model in float32 with what FP8 weights mean, by torch alone; inputs may be rounded."""
    model = copy.deepcopy(model)
    activation = None
    if rounds_inputs and settings.activation is not None:
        activation = parse_granularity(settings.activation)

    def rounding(layer):
        names = (f"{layer}.input_scale", f"{layer}.activation_scale")
        scale = next((tensors[name] for name in names if name in tensors), None)
        scale = None if scale is None else scale.reshape(())

        def hook(module, args):
            rows = args[0].reshape(-1, args[0].shape[-1])
            return (quantize(rows, activation, scale=scale).dequantize().reshape(args[0].shape),)

        return hook

    names = dict(model.named_modules())
    for name, x in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf in ("weight", "bias") and x.dtype == torch.bfloat16:
            getattr(names[layer], leaf).copy_(x.float())
        elif x.dtype == torch.float8_e4m3fn:
            scale = tensors.get(f"{layer}.weight_scale")
            scale = tensors[f"{layer}.weight_scale_inv"] if scale is None else scale
            if settings.weight == "block 128x128":
                scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                scale = scale[: x.shape[0], : x.shape[1]]
            names[layer].weight.copy_(x.float() * scale.float())
            if activation is not None:
                names[layer].register_forward_pre_hook(rounding(layer))
    return model

"""from_pretrained with OctavoConfig: quantized on the way in, saved and loaded bit by bit."""

import gc
import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")


from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from octavo import (
    CheckpointError,
    ConfigError,
    OctavoConfig,
    Recipe,
    UnsupportedError,
    apply_,
    calibrate_linear,
    quantize_,
    restore_,
)
from octavo.layers.linear import Fp8Linear
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.fp8_folders import make_plain
from octavo_testkit.models.text_models import VISION_LANGUAGE, make_decoder, make_prompts

UP = "model.layers.0.mlp.up_proj"
SETTINGS = {
    "default": {},
    "tensor": {"weight": "tensor", "activation": "tensor"},
    "blocks": {"weight": "block 128x128"},
    "weight only": {"activation": None},
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def run(model):
    return model(input_ids=make_prompts(1, 23)["input_ids"], use_cache=False).logits


def save(folder, model=None, **options):
    (make_plain() if model is None else model).save_pretrained(folder, **options)
    return folder


def load(folder, *args, kind=AutoModelForCausalLM, **kwargs):
    """The model, and what transformers found missing and unexpected."""
    config = OctavoConfig(*args) if args else None
    options = {"attn_implementation": "eager"}
    options |= {} if config is None else {"quantization_config": config}
    model, info = kind.from_pretrained(folder, output_loading_info=True, **options, **kwargs)
    return model, info["missing_keys"], info["unexpected_keys"]


def assert_same_model(actual, expected):
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, x in ours.items():
        assert x.dtype == theirs[name].dtype, name
        assert_same_bits(x, theirs[name])
    assert_same_bits(run(actual), run(expected))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_it_is_what_quantize_makes_and_a_saved_one_is_the_same(tmp_path, options, dtype):
    save(tmp_path / "plain", make_plain(mlp_bias=True), max_shard_size="200KB")
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 1
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=dtype, attn_implementation="eager"
    )
    quantize_(expected, options, ignored_layers=["0"])
    model, missing, unexpected = load(tmp_path / "plain", options, ["0"], dtype=dtype)
    assert missing == unexpected == set()
    biases = [p for n, p in model.named_parameters() if n.endswith("1.mlp.up_proj.bias")]
    assert not model.training and [p.requires_grad for p in biases] == [False]
    assert_same_model(model, expected)
    save(tmp_path / "fp8", model, max_shard_size="100KB")
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 1
    again, missing, unexpected = load(tmp_path / "fp8", dtype=dtype)
    assert missing == unexpected == set()
    assert_same_model(again, model)
    save(tmp_path / "again", again)
    assert_same_model(load(tmp_path / "again", dtype=dtype)[0], model)


def test_the_saved_config_and_dtypes(tmp_path):
    save(tmp_path / "plain")
    load(tmp_path / "plain", "fp8", ["up_proj"])[0].save_pretrained(tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "octavo",
        "linear": {
            "format": "e4m3",
            "weight": "channel",
            "activation": "token",
            "scaling": "dynamic",
        },
        "ignored_layers": ["up_proj"],
    }
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (160, 280)
    assert tensors["model.layers.0.mlp.down_proj.weight_scale"].dtype == torch.float32
    assert f"{UP}.weight_scale" not in tensors


def test_another_dtype_leaves_weights_and_scales(tmp_path):
    save(tmp_path / "plain")
    load(tmp_path / "plain", "fp8", dtype="float32")[0].save_pretrained(tmp_path / "fp8")
    wide = load(tmp_path / "fp8", dtype="float32")[0]
    narrow = load(tmp_path / "fp8", dtype="bfloat16")[0]
    assert narrow.dtype == torch.bfloat16 and narrow.lm_head.weight.dtype == torch.bfloat16
    for name in ("weight", "weight_scale"):
        x = getattr(narrow.get_submodule(UP), name)
        assert_same_bits(x, getattr(wide.get_submodule(UP), name))


def test_static_scales_are_in_the_weights(tmp_path):
    plain = make_plain()
    scales = calibrate_linear(plain, [{"input_ids": make_prompts(1, 23)["input_ids"]}])
    save(tmp_path / "plain", plain)
    static = {"scaling": "static"}
    model, missing, unexpected = load(tmp_path / "plain", static, (), scales, dtype="float32")
    assert missing == unexpected == set()
    quantize_(plain, static, scales=scales)
    assert_same_model(model, plain)
    save(tmp_path / "fp8", model)
    assert "scales" not in (tmp_path / "fp8" / "config.json").read_text().split("linear")[0]
    assert_same_model(load(tmp_path / "fp8", dtype="float32")[0], model)


def test_a_config_is_good_for_two_models(tmp_path):
    plain = make_plain()
    scales = calibrate_linear(plain, [{"input_ids": make_prompts(1, 23)["input_ids"]}])
    save(tmp_path / "plain", plain)
    config = OctavoConfig({"scaling": "static"}, scales=scales)
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
        for _ in range(2)
    )
    assert_same_model(first, second)
    assert config.scales is scales


def test_static_without_scales_raises(tmp_path):
    save(tmp_path / "plain")
    with pytest.raises(ConfigError, match="needs scales, got none"):
        load(tmp_path / "plain", {"scaling": "static"})
    with pytest.raises(CheckpointError, match="up_proj"):
        load(tmp_path / "plain", {"scaling": "static"}, (), {f"{UP}x": {"input": 0.1}})


def test_a_model_that_quantize_made_is_saved_as_fp8(tmp_path):
    model = make_plain()
    quantize_(model, {"weight": "tensor"})
    save(tmp_path / "fp8", model)
    assert_same_model(load(tmp_path / "fp8", dtype="float32")[0], model)


def test_a_tied_head_and_its_embedding_stay_plain_and_tied(tmp_path):
    save(tmp_path / "plain", make_plain(tie_word_embeddings=True))
    model, missing, unexpected = load(tmp_path / "plain", "fp8")
    assert missing == unexpected == set()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save(tmp_path / "fp8", model)
    again, missing, unexpected = load(tmp_path / "fp8")
    assert missing == unexpected == set()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert_same_model(again, model)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(tmp_path, device_map):
    save(tmp_path / "plain")
    expected, _, _ = load(tmp_path / "plain", "fp8")
    model, missing, _ = load(tmp_path / "plain", "fp8", device_map=device_map)
    assert missing == set()
    assert_same_model(model, expected)
    save(tmp_path / "fp8", model)
    assert_same_model(load(tmp_path / "fp8", device_map=device_map)[0], expected)


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bits(tmp_path):
    save(tmp_path / "plain")
    expected, _, _ = load(tmp_path / "plain", "fp8", dtype="bfloat16")
    model, missing, _ = load(tmp_path / "plain", "fp8", dtype="bfloat16", device_map="cuda")
    assert missing == set() and model.get_submodule(UP).weight.is_cuda
    for name, x in model.state_dict().items():
        assert_same_bits(x.cpu(), expected.state_dict()[name])
    save(tmp_path / "fp8", model)
    again, _, _ = load(tmp_path / "fp8", device_map="cuda", dtype="bfloat16")
    for name, x in again.state_dict().items():
        assert_same_bits(x.cpu(), expected.state_dict()[name])


def test_a_pattern_that_matches_nothing_raises(tmp_path):
    save(tmp_path / "plain")
    with pytest.raises(ConfigError, match="matches none"):
        load(tmp_path / "plain", "fp8", ["img_mlp"])


def test_a_disk_is_no_device(tmp_path):
    save(tmp_path / "plain")
    with pytest.raises(UnsupportedError, match="disk"):
        load(tmp_path / "plain", "fp8", device_map={"model": "cpu", "lm_head": "disk"})


def test_reports_of_missing_and_unexpected_keys(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{UP}.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.other.weight"] = torch.ones(3)
    save_file(tensors, file, metadata={"format": "pt"})
    model, missing, unexpected = load(tmp_path / "plain", "fp8")
    assert missing == {f"{UP}.weight", "model.norm.weight"}
    assert unexpected == {"model.layers.0.mlp.other.weight"}
    assert run(model).isfinite().all()  # transformers made up what was missing


def test_nan_in_a_weight_raises(tmp_path):
    plain = make_plain()
    plain.get_submodule(UP).weight[3, 5] = torch.nan
    save(tmp_path / "plain", plain)
    with pytest.raises(CheckpointError, match=r"up_proj.*1 NaN or Inf"):
        load(tmp_path / "plain", "fp8")


def test_a_weight_of_another_size_raises(tmp_path):
    save(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps({**config, "head_dim": 20}))
    with pytest.raises(CheckpointError, match=r"expected a weight \[80, 160\], got \[160, 160\]"):
        load(tmp_path / "plain", "fp8")


def test_weights_that_are_fp8_already_are_not_quantized_again(tmp_path):
    from octavo_testkit.models.fp8_folders import HF_QUANT_CONFIG, fp8_tensors, write

    plain = make_plain()
    write(tmp_path / "x", plain, fp8_tensors(plain, "tensor"), None, HF_QUANT_CONFIG)
    with pytest.raises(CheckpointError, match="octavo.load_fp8"):
        load(tmp_path / "x", "fp8")


def test_integers_are_no_plain_weights(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].to(torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.weight in I8"):
        load(tmp_path / "plain", "fp8")


def test_broken_folders_of_our_own_raise(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path / "plain")
    save(tmp_path / "fp8", load(tmp_path / "plain", "fp8")[0])
    file = tmp_path / "fp8" / "model.safetensors"
    whole = load_file(file)
    for name, x, message in (
        ("weight_scale", None, "expected weight_scale"),
        ("weight_scale", torch.zeros(280), "positive finite"),
        ("weight_scale", torch.ones(1), "expected shape"),
        ("weight", torch.ones(280, 160), "weight_scale"),
    ):
        tensors = {**whole, f"{UP}.{name}": x}
        save_file({n: t for n, t in tensors.items() if t is not None}, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "fp8")


def test_a_vision_language_model(tmp_path):
    save(tmp_path / "plain", make_decoder(VISION_LANGUAGE))
    kind = AutoModelForImageTextToText
    model, missing, unexpected = load(tmp_path / "plain", "fp8", ["visual"], kind=kind)
    assert missing == unexpected == set()
    save(tmp_path / "fp8", model)
    again, missing, unexpected = load(tmp_path / "fp8", kind=kind)
    assert missing == unexpected == set()
    assert_same_model(again, model)
    fp8 = [name for name, module in again.named_modules() if isinstance(module, Fp8Linear)]
    assert fp8 and not any("visual" in name for name in fp8)


def test_with_a_kv_cache_generate_and_restore(tmp_path):
    save(tmp_path / "plain")
    model, _, _ = load(tmp_path / "plain", "fp8", dtype="bfloat16")
    apply_(model, Recipe(kv_cache={"scaling": "unit"}))
    assert model.generate(**make_prompts(2, 9), max_new_tokens=3).shape == (2, 12)
    with pytest.raises(UnsupportedError, match="cannot be restored"):
        restore_(model)


@pytest.mark.slow
def test_a_fresh_process_knows_what_was_saved(tmp_path):
    save(tmp_path / "plain")
    save(tmp_path / "fp8", load(tmp_path / "plain", "fp8")[0])
    code = (
        "import sys; from transformers import AutoModelForCausalLM as kind\n"
        "from octavo.integrations.transformers.load import load_weights\n"
        "model = load_weights(sys.argv[1], kind, dtype='auto', device='cpu')\n"
        "print(type(model.model.layers[0].mlp.up_proj).__name__)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "fp8")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "Fp8Linear\n", done.stderr


def live_bytes():
    """How many bytes of numbers are alive in tensors, each storage once."""
    storages = {}
    for x in gc.get_objects():
        # Not those that compiling has left, which have no numbers.
        if type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta:
            storage = x.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_while_loading(folder, monkeypatch, kept=None):
    """The most bytes alive when a weight has just come, over what there was before."""
    quantize_weight, peaks, before = Fp8Linear.quantize_weight_, [], live_bytes()

    def measure(self, weight):
        if kept is not None:
            kept.append(weight)
        peaks.append(live_bytes() - before)
        return quantize_weight(self, weight)

    monkeypatch.setattr(Fp8Linear, "quantize_weight_", measure)
    model, _, _ = load(folder, "fp8", dtype="bfloat16")
    return max(peaks), model


@pytest.mark.slow
@pytest.mark.parametrize("is_planted", [False, True])
def test_no_more_than_the_fp8_model_and_a_layer_is_in_memory(tmp_path, monkeypatch, is_planted):
    plain = make_plain(hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    save(tmp_path / "plain", plain.to(torch.bfloat16))
    del plain
    gc.collect()
    kept = [] if is_planted else None
    peak, model = peak_while_loading(tmp_path / "plain", monkeypatch, kept)
    own = sum(x.nbytes for x in model.state_dict().values())
    layer = 2 * 256 * 512  # the largest weight in bfloat16
    assert (peak > own + 3 * layer) == is_planted
    linear = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    assert sum(2 * m.weight.numel() for m in linear) > own + 3 * layer  # it would show

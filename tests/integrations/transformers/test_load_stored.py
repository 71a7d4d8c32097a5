"""Every command and API loads a checkpoint with its scales, or raises: never weights alone."""

import ast
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")


from safetensors.torch import load_file, save_file

import octavo
from octavo import LLM, CheckpointError, ConfigError, Recipe
from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.checkpoints.export import export_checkpoint
from octavo.integrations.transformers.text_model import load_text_model
from octavo.integrations.transformers.vision_language import load_vlm_reader, open_vision_language
from octavo.integrations.transformers.vision_tower import open_tower
from octavo.layers.linear import Fp8Linear
from octavo.measure import store
from octavo.measure.bench.engine import open_subject
from octavo.numerics.granularity import parse_granularity
from octavo.numerics.quantize import quantize
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.request import Sampling
from octavo.serving.engine.settings import EngineSettings
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models import vlm_folders
from octavo_testkit.models.fp8_folders import (
    BLOCK_FP8,
    HF_QUANT_CONFIG,
    MODELOPT,
    TENSOR_FP8,
    compressed_tensors,
    dequantized,
    fp8_tensors,
    make_plain,
    write,
)
from octavo_testkit.models.text_models import make_decoder, make_prompts, make_tokenizer

NUM_TOKENS = 6
STATIC = {"weight": "tensor", "is_static": True}
# Writer -> its quantization_config, its hf_quant_config.json, how its tensors are made.
FORMATS = {
    "modelopt file": (None, HF_QUANT_CONFIG, STATIC),
    "modelopt config": ({"quant_method": "modelopt", **MODELOPT}, None, STATIC),
    "compressed-tensors": (compressed_tensors(), None, {"weight": "channel"}),
    "deepseek": (
        BLOCK_FP8,
        None,
        {"weight": "block 128x128", "scale_name": "weight_scale_inv"},
    ),
    "autofp8": (TENSOR_FP8, None, STATIC),
}
KV_NAMES = [f"model.layers.{layer}.self_attn" for layer in range(2)]
KV_SCALES = ScaleSet({name: LayerScales(None, 0.5, 0.25) for name in KV_NAMES})


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def save(folder, form="modelopt file", change=lambda tensors: None):
    """A folder in a format with a tokenizer; and the tensors, and the plain model behind them."""
    config, hf_quant_config, how = FORMATS[form] if isinstance(form, str) else form
    plain = make_plain(vocab_size=300)
    tensors = fp8_tensors(plain, **how)
    change(tensors)
    write(folder, plain, tensors, config, hf_quant_config)
    make_tokenizer().save_pretrained(folder)
    return str(folder), tensors, plain


def save_plain(folder, change=lambda tensors: None, config=None):
    """A folder in float32, its tensors changed; and the model."""
    plain = make_plain(vocab_size=300)
    tensors = {name: x.clone() for name, x in plain.state_dict().items()}
    change(tensors)
    write(folder, plain, tensors, config)
    make_tokenizer().save_pretrained(folder)
    return str(folder), plain


def prompt():
    return make_prompts(1, 23)["input_ids"]


def greedy(model):
    ids = prompt()
    for _ in range(NUM_TOKENS):
        best = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, best[:, None]], 1)
    return ids[0, -NUM_TOKENS:].tolist()


def answer(llm):
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
    return list(llm.generate([prompt()[0].tolist()], sampling)[0].tokens)


def twin(loaded, tensors, plain):
    """The dequantized model in float32, whose inputs are rounded as the FP8 model's are."""
    return dequantized(plain, tensors, fp8_settings(loaded), rounds_inputs=True)


def fp8_settings(model):
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert layers, "no layer runs in FP8"
    return layers[0].settings


def assert_same_state(actual, expected):
    actual, expected = actual.state_dict(), expected.state_dict()
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert_same_bits(actual[name], x)


@pytest.mark.parametrize("form", FORMATS)
def test_llm_answers_as_the_dequantized_twin(tmp_path, form):
    folder, tensors, plain = save(tmp_path / "model", form)
    llm = LLM(folder, dtype="float32", device="cpu")
    assert answer(llm) == greedy(twin(llm.engine.model, tensors, plain))


def test_a_server_answers_as_the_dequantized_twin(tmp_path):
    folder, tensors, plain = save(tmp_path / "model")
    llm = object.__new__(LLM)
    llm.engine = load_engine(folder, Recipe(), EngineSettings(), dtype="float32", device="cpu")
    llm._num_requests = 0
    assert answer(llm) == greedy(twin(llm.engine.model, tensors, plain))


def test_a_benchmark_runs_what_the_dequantized_twin_is(tmp_path):
    folder, tensors, plain = save(tmp_path / "model")
    model = open_subject(folder, None, dtype="float32", device="cpu", layers=None).model
    assert greedy(model) == greedy(twin(model, tensors, plain))


def test_an_evaluation_finds_the_perplexity_of_the_dequantized_twin(tmp_path):
    folder, tensors, plain = save(tmp_path / "model")
    model = load_text_model(folder, dtype="float32", device="cpu").model
    own = dequantized(plain, tensors, fp8_settings(model), rounds_inputs=False)
    write(tmp_path / "twin", plain, own.state_dict())
    make_tokenizer().save_pretrained(tmp_path / "twin")
    (tmp_path / "text").write_text("Books in octavo have eight leaves to the sheet. " * 20)
    args = ["--data", tmp_path / "text", "--context", 60, "--chunk", 30, "-n", 1]
    args += ["--recipe", "baseline", "--dtype", "float32"]
    found = []
    for name in (folder, tmp_path / "twin"):
        path = tmp_path / f"{Path(name).name}.jsonl"
        words = ["eval", "perplexity", name, *args, "-o", path]
        assert run(make_app(COMMANDS), list(map(str, words))) == 0
        found.append(store.read(path)[0].values["perplexity"])
    assert found[0] == pytest.approx(found[1], rel=0.02)  # inputs are rounded to FP8


INT4 = compressed_tensors(format="pack-quantized")
REFUSED = {
    **{method: {"quant_method": method} for method in ("awq", "gptq", "bitsandbytes", "nvfp4")},
    **{method: {"quant_method": method} for method in ("torchao", "fbgemm_fp8", "hqq", "unheard")},
    "modelopt nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "int4": INT4,
}


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED.keys())
def test_other_formats_raise(tmp_path, config):
    folder, _ = save_plain(tmp_path, config=config)
    with pytest.raises(CheckpointError, match=r"expected .*, got ") as info:
        load_text_model(folder)
    assert folder in str(info.value)


def scale_of_a_weight(tensors):
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.tensor(0.5)


def scale_of_a_cache(tensors):
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)


def fp8_weight(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


NOT_SAID = {
    "scale": (scale_of_a_weight, "up_proj.weight_scale"),
    "cache": (scale_of_a_cache, "self_attn.k_scale"),
    "fp8": (fp8_weight, r"up_proj.weight \(F8_E4M3\)"),
}


@pytest.mark.parametrize(("change", "message"), NOT_SAID.values(), ids=NOT_SAID.keys())
def test_scales_and_fp8_weights_that_no_config_announces_raise(tmp_path, change, message):
    folder, _ = save_plain(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"no config says.*{message}"):
        load_text_model(folder)


def test_fp8_weights_in_a_file_of_torch_raise(tmp_path):
    folder, _ = save_plain(tmp_path, fp8_weight)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no config says.*\(float8_e4m3fn\)"):
        load_text_model(folder)


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_plain_weights_with_scales_of_the_cache_are_plain_and_scales_are_used(
    tmp_path, format, caplog
):
    folder, plain = save_plain(tmp_path / "plain")
    export_checkpoint(Path(folder), KV_SCALES, tmp_path / "new", format=format)
    model = load_text_model(str(tmp_path / "new"), dtype="float32", device="cpu").model
    assert_same_state(model, plain)
    assert greedy(model) == greedy(plain)
    LLM(str(tmp_path / "new"), dtype="float32", device="cpu")
    assert "brings scales for an FP8 KV cache, which are not used" in caplog.text
    octavo.apply_(model, Recipe(kv_cache="fp8"))
    assert model.model.layers[1].self_attn.octavo_attention.key_scale == 0.5


def test_scales_of_the_cache_in_an_fp8_checkpoint_are_used_or_said(tmp_path, caplog):
    def add(tensors):
        for name in KV_NAMES:
            tensors[f"{name}.k_proj.k_scale"] = torch.tensor(0.5)
            tensors[f"{name}.v_proj.v_scale"] = torch.tensor(0.25)

    folder, _, _ = save(tmp_path / "model", change=add)
    LLM(folder, recipe=Recipe(kv_cache="fp8"), dtype="float32", device="cpu")
    assert "scales" not in caplog.text
    LLM(folder, dtype="float32", device="cpu")
    assert f"{folder} brings scales for an FP8 KV cache, which are not used" in caplog.text


def test_what_octavo_saved_is_loaded_to_the_bit(tmp_path):
    plain = make_plain(vocab_size=300)
    octavo.quantize_(plain, "fp8")
    plain.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = load_text_model(str(tmp_path), device="cpu").model
    assert_same_state(model, plain)
    assert greedy(model) == greedy(plain)


def test_quantizing_an_fp8_checkpoint_says_to_leave_it_out(tmp_path):
    folder, _, _ = save(tmp_path / "model")
    with pytest.raises(ConfigError, match="in FP8 already.*leave --quantization"):
        LLM(folder, recipe=Recipe(linear="fp8"), dtype="float32", device="cpu")


def test_mxfp4_of_gpt_oss_is_dequantized(tmp_path):
    sizes = {"num_hidden_layers": 1, "vocab_size": 300, "sliding_window": 8}
    plain = make_decoder("gpt_oss", torch.bfloat16, **sizes)
    tensors = dict(plain.state_dict())
    generator = torch.Generator().manual_seed(3)
    for part, (rows, columns) in {"gate_up_proj": (256, 64), "down_proj": (64, 128)}.items():
        name = f"model.layers.0.mlp.experts.{part}"
        shape = (2, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
        tensors.pop(name)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain.get_parameter(name).copy_(from_mxfp4(blocks, scales).transpose(1, 2))
    write(tmp_path, plain, tensors, {"quant_method": "mxfp4"})
    make_tokenizer().save_pretrained(tmp_path)
    model = load_text_model(str(tmp_path), dtype="bfloat16", device="cpu").model
    experts = "model.layers.0.mlp.experts"
    for part in ("gate_up_proj", "down_proj"):
        name = f"{experts}.{part}"
        assert_same_bits(model.get_parameter(name), plain.get_parameter(name))


def from_mxfp4(blocks, scales):
    """[experts, rows, columns] of packed pairs of e2m1, low half first, and e8m0 scales."""
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    e2m1 = torch.cat([e2m1, -e2m1])
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).long()
    numbers = e2m1[pairs].flatten(-2) * (scales.float() - 127).exp2()[..., None]
    return numbers.flatten(-2)


@pytest.mark.parametrize(
    "load",
    [
        lambda folder: load_vlm_reader(folder).model,
        lambda folder: open_vision_language(folder, torch.device("cpu")).model,
    ],
    ids=["eval chartqa", "bench mm-processor"],
)
def test_image_text_models_bring_their_scales(tmp_path, load):
    folder = vlm_folders.write_llava(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if "language_model" in n and n.endswith("up_proj.weight"))
    stored = quantize(tensors[name].float(), parse_granularity("channel"))
    tensors[name] = stored.data
    tensors[f"{name}_scale"] = stored.scale[:, None].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = compressed_tensors()
    (folder / "config.json").write_text(json.dumps(config))
    found = [m for m in load(str(folder)).modules() if isinstance(m, Fp8Linear)]
    assert len(found) == 1
    assert_same_bits(found[0].dequantize().float(), stored.dequantize())


def test_a_vision_tower_in_fp8_raises(tmp_path):
    model = make_decoder("qwen3_vl", torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert open_tower(tmp_path, torch.device("cpu")).weights == "checkpoint"
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(n for n in tensors if n.endswith("blocks.0.attn.qkv.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="expected F64, F32, F16, BF16, got F8_E4M3"):
        open_tower(tmp_path, torch.device("cpu"))


def test_few_files_load_weights():
    """Whoever else calls from_pretrained asks for a config, a tokenizer or a processor."""
    loaders = {"load.py", "gguf_file.py", "text_encoder.py"}
    root = Path(octavo.__file__).parent
    others = (
        "Config",
        "Tokenizer",
        "tokenizers",
        "Processor",
        "processors",
    )
    for path in sorted(root.rglob("*.py")):
        if path.name in loaders or "diffusers" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "from_pretrained":
                owner = ast.unparse(node.value)
                assert any(word in owner for word in others), f"{path.name}: {owner}"

"""KV-cache scales of checkpoints: every name and shape that is understood, every refusal."""

import json
import os
import struct
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.calibration.scale_file import LayerScales
from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.kv_scales import read_kv_scales
from octavo_testkit.models import checkpoint_folders as folders
from octavo_testkit.models.checkpoint_folders import (
    LAYERS,
    SCHEME,
    compressed_tensors,
    modelopt,
    weights,
    write,
)

K, V, Q = [0.5, 0.25], [0.125, 0.0625], [2.0, 3.0]
KV = {"k": K, "v": V}
DEFAULT = "{layer}.{part}_scale"
MODELOPT = "{layer}.{part}_proj.{part}_scale"


def kv_scales(form=DEFAULT, values=KV, **kwargs):
    return folders.scales(form, values, **kwargs)


def read(folder, tensors, *args, modules=None, **kwargs):
    return read_kv_scales(
        write(folder / "model", {**weights(), **tensors}, *args, **kwargs), modules
    )


def refusal(folder, tensors, *args, **kwargs):
    with pytest.raises(CheckpointError) as info:
        read(folder, tensors, *args, **kwargs)
    assert str(folder) in str(info.value)
    return str(info.value)


@pytest.mark.parametrize(
    "form",
    [
        DEFAULT,
        "{layer}.attn.{part}_scale",
        MODELOPT,
        "{layer}.qkv_proj.{part}_scale",
        "{layer}.qkqkv_proj.{part}_scale",
        "{layer}.{part}_cache.scale",
        "{layer}.{part}_proj.output_scale",
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_name_per_tensor(form, shape, dtype, tmp_path):
    tensors = kv_scales(form, shape=shape, dtype=dtype)
    found = read(tmp_path, tensors, compressed_tensors())
    assert dict(found.layers) == {
        layer: LayerScales(None, K[number], V[number]) for number, layer in enumerate(LAYERS)
    }


@pytest.mark.parametrize("form", [DEFAULT, "{layer}.attn.{part}_scale"])
def test_scales_for_queries(form, tmp_path):
    found = read(tmp_path, kv_scales(form, {**KV, "q": Q}), compressed_tensors())
    assert [scales.q for scales in found.layers.values()] == Q


def test_hyv3(tmp_path):
    tensors = kv_scales("{layer}.{part}_cache.scale") | kv_scales("{layer}.{part}.scale", {"q": Q})
    found = read(tmp_path, tensors, {"quant_method": "fp8"})
    assert [(s.q, s.k, s.v) for s in found.layers.values()] == list(zip(Q, K, V, strict=True))


@pytest.mark.parametrize("tail", [(), (1, 1)], ids=str)
def test_scales_per_head(tail, tmp_path):
    k, v = [[0.5, 0.25], [1.0, 2.0]], [[0.1, 0.2], [0.3, 0.4]]
    q = [[1.0, 2.0, 3.0, 4.0]] * 2
    tensors = kv_scales(values={"k": k, "v": v}, shape=(2, *tail))
    tensors |= kv_scales(values={"q": q}, shape=(4, *tail))
    found = read(tmp_path, tensors, compressed_tensors(strategy="attn_head"))
    exact = [tuple(torch.tensor(row).tolist()) for row in v]
    assert [s.v for s in found.layers.values()] == exact
    assert [s.k for s in found.layers.values()] == [tuple(row) for row in k]
    assert [s.q for s in found.layers.values()] == [tuple(row) for row in q]


def test_a_model_with_one_kv_head_has_scales_per_head_of_length_one(tmp_path):
    config = {**folders.CONFIG, "num_key_value_heads": 1}
    scheme = compressed_tensors(strategy="attn_head")
    found = read(tmp_path, kv_scales(shape=(1, 1, 1)), scheme, config=config)
    assert [s.k for s in found.layers.values()] == [(0.5,), (0.25,)]


def test_zero_points_of_zero_say_nothing(tmp_path):
    tensors = kv_scales() | kv_scales("{layer}.{part}_zero_point", {"k": [0.0, 0.0], "v": [0, 0]})
    tensors[f"{LAYERS[0]}.v_zero_point"] = torch.zeros(1).to(torch.float8_e4m3fn)
    tensors[f"{LAYERS[1]}.v_zero_point"] = torch.zeros(1, dtype=torch.int8)
    assert len(read(tmp_path, tensors, compressed_tensors()).layers) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_other_zero_points_are_refused(dtype, tmp_path):
    tensors = kv_scales() | {f"{LAYERS[1]}.k_zero_point": torch.ones(1).to(dtype)}
    said = refusal(tmp_path, tensors, compressed_tensors())
    assert "model.layers.1.self_attn.k_zero_point'" in said and "expected zeros" in said


def test_kv_scale_stands_for_both_with_a_warning(tmp_path):
    tensors = kv_scales("{layer}.kv_scale", {"kv": K})
    with pytest.warns(UserWarning, match="kv_scale, which is deprecated"):
        found = read(tmp_path, tensors, {"quant_method": "fp8", "kv_cache_scheme": "static"})
    assert [(s.k, s.v) for s in found.layers.values()] == [(0.5, 0.5), (0.25, 0.25)]


@pytest.mark.parametrize(
    "announced",
    [
        {"hf_quant_config": modelopt()},
        {"hf_quant_config": modelopt(None)},
        {},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": SCHEME}},
        {
            "quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": SCHEME},
            "hf_quant_config": modelopt(),
        },
        {"quantization_config": modelopt()},
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
    ],
    ids=str,
)
def test_modelopt_with_and_without_a_word(announced, tmp_path):
    found = read(tmp_path, kv_scales(MODELOPT), **announced)
    assert [(s.k, s.v) for s in found.layers.values()] == list(zip(K, V, strict=True))


def test_nemotron_h_has_attention_in_some_layers_only(tmp_path):
    layers = ["backbone.layers.3.mixer", "backbone.layers.7.mixer"]
    config = {**folders.CONFIG, "num_hidden_layers": 9}
    tensors = weights(layers) | kv_scales(MODELOPT, layers=layers)
    tensors["backbone.layers.0.mixer.in_proj.weight"] = torch.ones(2)
    found = read_kv_scales(
        write(tmp_path / "m", tensors, hf_quant_config=modelopt(), config=config)
    )
    assert list(found.layers) == layers


@pytest.mark.parametrize(
    "stem", ["model.language_model.layers.{}.self_attn", "language_model.model.layers.{}.self_attn"]
)
@pytest.mark.parametrize(
    "module", ["model.language_model.layers.{}.self_attn", "model.layers.{}.self_attn"]
)
def test_names_of_the_model_that_is_asked_about(stem, module, tmp_path):
    layers = [stem.format(number) for number in range(2)]
    modules = [module.format(number) for number in range(2)]
    vision = weights(["model.visual.layers.0.self_attn"])
    tensors = weights(layers) | vision | kv_scales(layers=layers)
    config = {"text_config": folders.CONFIG, "vision_config": {"num_hidden_layers": 1}}
    folder = write(tmp_path / "m", tensors, compressed_tensors(), config=config)
    assert list(read_kv_scales(folder, modules).layers) == modules
    with pytest.raises(CheckpointError, match="got some for .*layers.1"):
        read_kv_scales(folder, modules[:1])
    with pytest.raises(CheckpointError, match="expected scales for .*layers.2.*got none"):
        read_kv_scales(folder, [*modules, module.format(2)])


@pytest.mark.parametrize("config", [None, {"quant_method": "gptq"}, {"quant_method": "fp8"}])
def test_a_checkpoint_without_scales_has_none(config, tmp_path):
    linear = {f"{LAYERS[0]}.k_proj.{name}": torch.ones(1) for name in ("weight_scale", "bias")}
    linear |= {f"{LAYERS[0]}.q_proj.weight_scale_inv": torch.ones(1, 1)}
    linear |= {f"{LAYERS[0]}.k_norm.scale": torch.ones(1)}
    assert read(tmp_path, linear, config) is None


def test_output_scales_of_projections_are_no_kv_scales_without_a_scheme(tmp_path):
    groups = {"group_0": {"targets": ["Linear"], "output_activations": {"num_bits": 8}}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    tensors = kv_scales("{layer}.{part}_proj.output_scale")
    assert read(tmp_path, tensors, config) is None
    both = {**config, "kv_cache_scheme": SCHEME}
    assert "got both announced and" in refusal(tmp_path, tensors, both)


@pytest.mark.parametrize(
    "name",
    [
        "k_scale_inv",
        "prob_scale",
        "attn_mqa.k_scale",
        "k_proj.v_scale",
        "q_proj.q_scale",
        "kv_cache_scaling_factor",
        "k_bmm_quantizer._amax",
        "kv_cache.k.scale",
        "mla_attn.mla_attn.k_scale",
        "kv_zero_point",
        "k_global_scale",
        "prob_output_scale",
    ],
)
def test_names_that_are_not_understood_are_named(name, tmp_path):
    tensors = kv_scales() | {f"{LAYERS[1]}.{name}": torch.ones(1)}
    for config in (compressed_tensors(), None):
        said = refusal(tmp_path, tensors, config)
        assert f"{LAYERS[1]}.{name}" in said and LAYERS[0] + ".k_scale'" not in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_bits": 4}, "expected num_bits 8, got 4"),
        ({"num_bits": None}, "expected num_bits 8, got None"),
        ({"type": "int"}, "expected type 'float', got 'int'"),
        ({"type": "float_e5m2"}, "got 'float_e5m2'"),
        ({"strategy": "token"}, "expected strategy 'tensor' or 'attn_head', got 'token'"),
        ({"dynamic": True}, "expected dynamic False, got True"),
        ({"dynamic": "local"}, "expected dynamic False, got 'local'"),
        ({"dynamic": 0}, "expected dynamic False, got 0"),
        ({"symmetric": False}, "expected symmetric True, got False"),
        ({"group_size": 16}, "expected group_size None, got 16"),
        ({"fp8_format": "e5m2"}, "settings we do not know: 'fp8_format'"),
    ],
    ids=str,
)
def test_schemes_with_another_meaning(settings, said, tmp_path):
    assert said in refusal(tmp_path, kv_scales(), compressed_tensors(**settings))


@pytest.mark.parametrize(
    ("config", "hf_quant_config", "said"),
    [
        (None, modelopt("NVFP4"), "expected kv_cache_quant_algo FP8, got 'NVFP4'"),
        (None, modelopt("FP8_E5M2"), "expected kv_cache_quant_algo FP8, got 'FP8_E5M2'"),
        (None, {"quantization": []}, "expected quantization to be an object"),
        ({"quant_method": "fp8", "kv_cache_scheme": "dynamic"}, None, "expected kv_cache_scheme"),
        (
            {"quant_method": "fp8", "kv_cache_quant_algo": "X"},
            None,
            "only of quant_method modelopt",
        ),
        ({"kv_cache_scheme": SCHEME}, None, "expected a quant_method, got None"),
        ([], None, "expected quantization_config to be an object"),
        ({"quant_method": "gptq"}, None, "expected a kv_cache_scheme for"),
        ({"quant_method": "compressed-tensors"}, None, "expected a kv_cache_scheme for"),
        (None, None, "expected a kv_cache_scheme for"),
        (compressed_tensors(), modelopt(), "only beside quant_method modelopt"),
        (
            {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
            modelopt("NVFP4"),
            "expected kv_cache_quant_algo FP8, got 'NVFP4'",
        ),
        ({**compressed_tensors(), "dtype": "fp8_e4m3FNUZ"}, None, "got a checkpoint for fnuz"),
    ],
    ids=str,
)
def test_configs_that_do_not_announce_what_is_there(config, hf_quant_config, said, tmp_path):
    assert said in refusal(tmp_path, kv_scales(), config, hf_quant_config)


def test_what_else_compressed_tensors_writes_says_nothing(tmp_path):
    settings = compressed_tensors(group_size=None, observer="static_minmax", observer_kwargs={})
    attention = {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 8}}
    settings |= {"config_groups": {"attention": attention}, "format": "int-quantized"}
    assert len(read(tmp_path, kv_scales(values={**KV, "q": Q}), settings).layers) == 2


def test_two_quantization_configs_must_agree(tmp_path):
    text = {**folders.CONFIG, "quantization_config": compressed_tensors(strategy="attn_head")}
    config = {"text_config": text}
    said = refusal(tmp_path, kv_scales(), compressed_tensors(), config=config)
    assert "expected one quantization_config, got two" in said


@pytest.mark.parametrize(
    "announced",
    [
        {"quantization_config": compressed_tensors()},
        {"hf_quant_config": modelopt()},
        {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}},
    ],
)
def test_announced_scales_that_are_absent(announced, tmp_path):
    assert "that its config announces, got none" in refusal(tmp_path, {}, **announced)


@pytest.mark.parametrize(
    ("strategy", "shape", "said"),
    [
        ("tensor", (2,), "expected one number by strategy tensor, got shape [2]"),
        ("tensor", (1, 1), "expected one number by strategy tensor, got shape [1, 1]"),
        ("tensor", (0,), "got shape [0]"),
        ("attn_head", (1,), "expected shape [2, 1, 1] or [2] by strategy attn_head, got shape [1]"),
        ("attn_head", (), "got shape []"),
        ("attn_head", (4,), "got shape [4]"),
        ("attn_head", (1, 2, 1, 1), "got shape [1, 2, 1, 1]"),
        ("attn_head", (2, 1, 4), "got shape [2, 1, 4]"),
        (None, (3,), "expected shape [2, 1, 1] or [2], got shape [3]"),
    ],
)
def test_wrong_shapes(strategy, shape, said, tmp_path):
    tensors = {name: torch.ones(shape) for name in kv_scales()}
    config = compressed_tensors(strategy=strategy)
    if strategy is None:
        del config["kv_cache_scheme"]["strategy"]
    message = refusal(tmp_path, tensors, config)
    assert said in message and f"{LAYERS[0]}.k_scale" in message


def test_queries_have_heads_of_their_own(tmp_path):
    tensors = {name: torch.ones(2, 1, 1) for name in kv_scales(values={**KV, "q": Q})}
    said = refusal(tmp_path, tensors, compressed_tensors(strategy="attn_head"))
    assert "q_scale': expected shape [4, 1, 1]" in said


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-45])
@pytest.mark.parametrize("is_per_head", [False, True])
def test_values_that_are_no_scales(value, is_per_head, tmp_path):
    shape, strategy = ((2, 1, 1), "attn_head") if is_per_head else ((1,), "tensor")
    tensors = {name: torch.ones(shape) for name in kv_scales()}
    tensors[f"{LAYERS[1]}.v_scale"].view(-1)[-1] = value
    said = refusal(tmp_path, tensors, compressed_tensors(strategy=strategy))
    assert f"{LAYERS[1]}.v_scale': expected positive finite scales" in said


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_dtypes_that_scales_do_not_have(dtype, tmp_path):
    tensors = {
        name: tensor.to(dtype)
        for name, tensor in kv_scales(values={"k": [1], "v": [1]}, layers=LAYERS[:1]).items()
    }
    said = refusal(tmp_path, tensors, compressed_tensors())
    assert "expected F64, F32, F16, BF16, got" in said


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (
            ["1.self_attn.k_scale", "1.self_attn.v_scale", "1.self_attn.q_scale"],
            "scales for 'model.layers.1.self_attn' too",
        ),
        (
            ["1.self_attn.v_scale"],
            "model.layers.1.self_attn: expected scales for k and v, got none",
        ),
        (
            ["0.self_attn.q_scale"],
            "q scales for all layers, got none for 'model.layers.0.self_attn'",
        ),
    ],
)
def test_incomplete_scales(left_out, said, tmp_path):
    tensors = kv_scales(values={**KV, "q": Q})
    for name in left_out:
        del tensors[f"model.layers.{name}"]
    assert said in refusal(tmp_path, tensors, compressed_tensors())


def test_layers_without_known_projections_are_counted(tmp_path):
    layers = ["gpt_neox.layers.0.attention"]
    tensors = weights(layers, ["query_key_value"]) | kv_scales(layers=layers)
    with pytest.raises(CheckpointError, match="gpt_neox.layers.1.attention"):
        read_kv_scales(write(tmp_path / "m", tensors, compressed_tensors()))


def test_layers_that_predict_further_ahead_need_no_scales(tmp_path):
    extra = weights(["model.layers.2.self_attn"])
    assert len(read(tmp_path, kv_scales() | extra, compressed_tensors()).layers) == 2


def test_two_scales_for_the_same(tmp_path):
    said = refusal(tmp_path, kv_scales() | kv_scales(MODELOPT), compressed_tensors())
    assert "expected one scale, got" in said
    said = refusal(
        tmp_path, kv_scales() | kv_scales("{layer}.kv_scale", {"kv": K}), compressed_tensors()
    )
    assert "expected one scale, got" in said


def test_only_zero_points(tmp_path):
    tensors = kv_scales("{layer}.{part}_zero_point", {"k": [0, 0], "v": [0, 0]})
    assert "expected scales, got only" in refusal(tmp_path, tensors, compressed_tensors())


def test_sharded_weights(tmp_path):
    folder = write(tmp_path / "m", weights() | kv_scales(), compressed_tensors())
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert [s.k for s in read_kv_scales(folder).layers.values()] == K
    # A scale that the index forgot is loaded by others, and so here.
    del weight_map[f"{LAYERS[0]}.k_scale"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert [s.k for s in read_kv_scales(folder).layers.values()] == K


def test_weights_are_never_read(tmp_path):
    """A file that claims a tensor of 1 TiB: only its header and its scales are looked at."""
    num_bytes = 2**40
    header = {f"{LAYERS[0]}.k_proj.weight": (num_bytes // 2, "BF16", 0, num_bytes)}
    numbers = [0.5, 0.25]
    for place, part in enumerate("kv"):
        start = num_bytes + 4 * place
        header[f"{LAYERS[0]}.{part}_scale"] = (1, "F32", start, start + 4)
    rows = {
        name: {"dtype": dtype, "shape": [length], "data_offsets": [start, stop]}
        for name, (length, dtype, start, stop) in header.items()
    }
    folder = write(tmp_path / "m", weights(), compressed_tensors())
    text = json.dumps(rows).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            os.truncate(file.fileno(), 8 + len(text) + num_bytes)
        except OSError:
            pytest.skip("the file system has no sparse files of 1 TiB")
        file.seek(8 + len(text) + num_bytes)
        file.write(struct.pack("<2f", *numbers))
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    found = read_kv_scales(folder)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dict(found.layers) == {LAYERS[0]: LayerScales(None, 0.5, 0.25)}
    assert peak_bytes < 2**20


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"1234567", "expected a safetensors file"),
        (struct.pack("<Q", 2**60) + b"{}", "expected a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "expected a header of tensors, got []"),
        (struct.pack("<Q", 2) + b"{x", "expected a safetensors header"),
        (struct.pack("<Q", 12) + b'{"a":{},    ', "expected a safetensors header"),
        (struct.pack("<Q", 10) + b'{"a": {}} ', "'a': got {}"),
        (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', "'a' appears twice"),
    ],
    ids=str,
)
def test_files_that_are_damaged(content, said, tmp_path):
    folder = write(tmp_path / "m", {})
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as info:
        read_kv_scales(folder)
    assert said in str(info.value)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [([0, 99], "goes beyond the end"), ([-4, 0], "goes beyond"), ([0, 2], "expected 1 numbers")],
)
def test_offsets_that_are_wrong(offsets, said, tmp_path):
    row = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    text = json.dumps({f"{LAYERS[0]}.{part}_scale": row for part in "kv"}).encode()
    folder = write(tmp_path / "m", {}, compressed_tensors())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
    with pytest.raises(CheckpointError, match=said):
        read_kv_scales(folder)


def test_folders_that_are_no_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match="expected a model's folder, got none"):
        read_kv_scales(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="expected config.json in .*, got nothing"):
        read_kv_scales(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert read_kv_scales(tmp_path) is None  # weights in another form: no scales in any of ours
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="config.json: expected an object"):
        read_kv_scales(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: expected JSON"):
        read_kv_scales(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "gone.safetensors"}, "names weight files that are missing: 'gone.safetensors'"),
        ({"a": "model.safetensors"}, "expected 'a' in model.safetensors, got none"),
        ({"a": "../model.safetensors"}, "expected file names, got '../model.safetensors'"),
        ({"a": 1}, "expected a weight_map"),
        (None, "expected a weight_map"),
        ({"a": "other.safetensors"}, "got both"),
    ],
    ids=str,
)
def test_an_index_that_is_wrong(weight_map, said, tmp_path):
    folder = write(tmp_path / "m", weights())
    save_file({"a": torch.ones(1)}, folder / "other.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=said):
        read_kv_scales(folder)


def test_a_tensor_in_two_files(tmp_path):
    folder = write(tmp_path / "m", {"a": torch.ones(1), "b": torch.ones(1)})
    save_file({"a": torch.ones(1)}, folder / "other.safetensors")
    weight_map = {"b": "model.safetensors", "a": "other.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="expected 'a' once"):
        read_kv_scales(folder)

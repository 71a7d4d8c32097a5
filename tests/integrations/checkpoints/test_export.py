"""Scales in an exported folder: read back to the bit, by others too, weights untouched."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.checkpoints import export as export_module
from octavo.integrations.checkpoints.export import export_checkpoint
from octavo.integrations.checkpoints.kv_scales import read_kv_scales
from octavo.integrations.checkpoints.scheme import find_quantization_config
from octavo_testkit.models import checkpoint_folders as folders
from octavo_testkit.models.checkpoint_folders import (
    LAYERS,
    compressed_tensors,
    modelopt,
    weights,
    write,
)

transformers = pytest.importorskip("transformers")

PER_TENSOR = ScaleSet(
    {
        layer: LayerScales(*torch.tensor([0.1, 0.2 + number, 0.3]).tolist())
        for number, layer in enumerate(LAYERS)
    }
)
PER_HEAD = ScaleSet(
    {
        layer: LayerScales(*(tuple(torch.rand(size).add(0.01).tolist()) for size in (4, 2, 2)))
        for layer in LAYERS
    }
)
WITHOUT_Q = ScaleSet({layer: LayerScales(None, s.k, s.v) for layer, s in PER_TENSOR.layers.items()})
WITHOUT_Q_PER_HEAD = ScaleSet(
    {layer: LayerScales(None, s.k, s.v) for layer, s in PER_HEAD.layers.items()}
)


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).bfloat16().eval()


@pytest.fixture(params=["single", "sharded"])
def source(request, model, tmp_path):
    folder = tmp_path / "source"
    model.save_pretrained(folder, max_shard_size="20KB" if request.param == "sharded" else "5GB")
    assert (folder / "model.safetensors").exists() == (request.param == "single")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "extra").mkdir()
    (folder / "extra" / "notes.txt").write_text("notes")
    (folder / ".git").mkdir()
    (folder / ".git" / "objects").write_text("history")
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def load_all(folder):
    """Every tensor that the index names."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in set(weight_map.values()):
        tensors = load_file(folder / file)
        assert set(tensors) == {name for name in weight_map if weight_map[name] == file}
        found |= tensors
    return found


@pytest.mark.parametrize(
    "scale_set", [PER_TENSOR, PER_HEAD, WITHOUT_Q, WITHOUT_Q_PER_HEAD], ids=["t", "h", "kv", "kvh"]
)
def test_round_trip_to_the_bit(source, scale_set, model, tmp_path):
    before = contents(source)
    target = tmp_path / "out"
    seen = []
    exported = export_checkpoint(source, scale_set, target, on_file=lambda *x: seen.append(x))
    assert contents(source) == before
    is_per_head = scale_set in (PER_HEAD, WITHOUT_Q_PER_HEAD)
    assert exported.strategy == ("attn_head" if is_per_head else "tensor")
    assert exported.has_q == (scale_set in (PER_TENSOR, PER_HEAD))
    assert exported.num_files == len(contents(target))
    assert [done for done, _ in seen] == list(range(seen[0][1] + 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]

    modules = [name for name, _ in model.named_modules() if name.endswith("self_attn")]
    assert dict(read_kv_scales(target, modules).layers) == dict(scale_set.layers)

    tensors = load_all(target)
    state = model.state_dict()
    for name in tensors.keys() & state.keys():
        assert tensors[name].dtype == state[name].dtype and tensors[name].equal(state[name])
    added = {name: tuple(t.shape) for name, t in tensors.items() if name not in state}
    parts = {"q": 4, "k": 2, "v": 2} if exported.has_q else {"k": 2, "v": 2}
    assert added == {
        f"{layer}.{part}_scale": (heads, 1, 1) if is_per_head else (1,)
        for layer in LAYERS
        for part, heads in parts.items()
    }
    assert all(tensors[name].dtype == torch.float32 for name in added)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())

    assert (target / "extra" / "notes.txt").read_text() == "notes"
    assert (target / "tokenizer.json").read_text() == "{}"
    assert not (target / ".git").exists() and not (target / "model.safetensors").exists()
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": exported.strategy,
            "dynamic": False,
            "symmetric": True,
        },
    }
    assert config == json.loads((source / "config.json").read_text())


def test_weights_are_hard_links_and_the_rest_is_not(source, tmp_path):
    exported = export_checkpoint(source, PER_TENSOR, tmp_path / "out")
    shards = list(source.glob("*.safetensors"))
    assert exported.num_linked == len(shards)
    assert {path.stat().st_nlink for path in shards} == {2}
    assert (source / "tokenizer.json").stat().st_nlink == 1


def test_links_of_a_hub_cache_are_followed(source, tmp_path):
    blobs = tmp_path / "blobs"
    shutil.move(source, blobs)
    source.mkdir()
    for path in blobs.iterdir():
        if path.is_file():
            (source / path.name).symlink_to(path)
    exported = export_checkpoint(source, PER_TENSOR, tmp_path / "out")
    assert exported.num_linked > 0
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert dict(read_kv_scales(tmp_path / "out").layers) == dict(PER_TENSOR.layers)


def test_where_there_are_no_hard_links_files_are_copied(source, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    exported = export_checkpoint(source, PER_TENSOR, tmp_path / "out")
    assert exported.num_linked == 0
    assert {path.stat().st_nlink for path in source.glob("*.safetensors")} == {1}
    assert dict(read_kv_scales(tmp_path / "out").layers) == dict(PER_TENSOR.layers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale_set", [PER_TENSOR, PER_HEAD, WITHOUT_Q], ids=["t", "h", "kv"])
def test_transformers_and_compressed_tensors_load_it(source, scale_set, model, tmp_path):
    pytest.importorskip("compressed_tensors")
    target = export_checkpoint(source, scale_set, tmp_path / "out").folder
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert all(name.endswith(".q_scale") for name in info["unexpected_keys"])
    found = loaded.state_dict()
    for name, weight in model.state_dict().items():
        assert found[name].equal(weight)
    for layer, scales in scale_set.layers.items():
        for part in "kv":
            scale = torch.tensor(getattr(scales, part))
            assert found[f"{layer}.{part}_scale"].flatten().equal(scale.reshape(-1).bfloat16())
    from compressed_tensors.quantization import QuantizationConfig

    loaded.save_pretrained(tmp_path / "theirs")  # without a config: llm-compressor adds it
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    config["quantization_config"] = QuantizationConfig.from_pretrained(loaded).to_dict()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    theirs = read_kv_scales(tmp_path / "theirs", LAYERS)
    for layer, scales in scale_set.layers.items():
        rounded = torch.tensor(scales.k).bfloat16().float()
        assert torch.tensor(theirs.layer(layer).k).equal(rounded)
        assert theirs.layer(layer).q is None

    tokens = torch.arange(12)[None]
    with torch.inference_mode():  # compressed-tensors emulates FP8 keys and values: close, not same
        logits, expected = loaded(tokens).logits, model(tokens).logits
    assert not logits.equal(expected)
    assert (logits - expected).float().norm() < 0.2 * expected.float().norm()


@pytest.mark.parametrize("scale_set", [PER_TENSOR, PER_HEAD], ids=["t", "h"])
def test_the_weights_load_without_compressed_tensors_too(source, scale_set, model, tmp_path):
    target = export_checkpoint(source, scale_set, tmp_path / "out").folder
    config = transformers.AutoConfig.from_pretrained(target)
    del config.quantization_config
    (target / "config.json").write_text(config.to_json_string())
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    for name, weight in model.state_dict().items():
        assert loaded.state_dict()[name].equal(weight)


def test_modelopt_format_loads_in_plain_transformers(source, model, tmp_path):
    target = tmp_path / "out"
    exported = export_checkpoint(source, PER_TENSOR, target, format="modelopt")
    assert not exported.has_q
    assert dict(read_kv_scales(target).layers) == dict(WITHOUT_Q.layers)
    added = load_all(target).keys() - model.state_dict().keys()
    assert added == {f"{name}.{part}_proj.{part}_scale" for name in LAYERS for part in "kv"}
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert json.loads((target / "hf_quant_config.json").read_text())["quantization"] == {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["*"],
    }
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    for name, weight in model.state_dict().items():
        assert loaded.state_dict()[name].equal(weight)


def small(folder, tensors=None, *args, **kwargs):
    return write(folder / "small", weights() if tensors is None else tensors, *args, **kwargs)


@pytest.mark.parametrize(
    ("scale_set", "layers", "projections", "said"),
    [
        (PER_HEAD, LAYERS, ("k_proj", "v_proj"), "one scale per tensor, got scales per head"),
        (PER_TENSOR, LAYERS, ("qkv_proj",), "needs self_attn.k_proj and v_proj"),
    ],
)
def test_scales_that_modelopt_has_no_place_for(scale_set, layers, projections, said, tmp_path):
    source = small(tmp_path, weights(layers, projections))
    with pytest.raises(UnsupportedError, match=said):
        export_checkpoint(source, scale_set, tmp_path / "out", format="modelopt")


def test_quantized_weights_of_compressed_tensors_keep_their_settings(tmp_path):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    settings |= {"config_groups": groups, "kv_cache_scheme": None, "ignore": ["lm_head"]}
    source = small(tmp_path, None, settings)
    target = export_checkpoint(source, PER_TENSOR, tmp_path / "out").folder
    found = find_quantization_config(json.loads((target / "config.json").read_text()))
    assert found.pop("kv_cache_scheme") == folders.SCHEME
    assert found == {key: settings[key] for key in settings if key != "kv_cache_scheme"}


def test_settings_of_the_text_model_stay_where_they_are(tmp_path):
    settings = {"quant_method": "compressed-tensors", "config_groups": {}}
    config = {"text_config": {**folders.CONFIG, "quantization_config": settings}}
    target = export_checkpoint(small(tmp_path, config=config), PER_TENSOR, tmp_path / "out").folder
    written = json.loads((target / "config.json").read_text())
    assert list(written) == ["text_config"]
    assert written["text_config"]["quantization_config"]["kv_cache_scheme"] == folders.SCHEME


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    ("config", "hf_quant_config", "said"),
    [
        ({"quant_method": "gptq"}, None, "quantized by compressed-tensors, got gptq"),
        ({"quant_method": "fp8"}, None, "quantized by compressed-tensors, got fp8"),
        (None, modelopt(None), "quantized by compressed-tensors, got modelopt"),
        (compressed_tensors(), None, "without KV-cache scales, got a config that announces some"),
    ],
    ids=str,
)
def test_sources_that_are_quantized_otherwise(format, config, hf_quant_config, said, tmp_path):
    source = small(tmp_path, None, config, hf_quant_config)
    with pytest.raises(CheckpointError) as info:
        export_checkpoint(source, PER_TENSOR, tmp_path / "out", format=format)
    assert said in str(info.value) or "expected weights in BF16 for ModelOpt" in str(info.value)
    assert list(tmp_path.iterdir()) == [source]


def test_sources_that_have_scales(tmp_path):
    target = export_checkpoint(small(tmp_path), PER_TENSOR, tmp_path / "out").folder
    with pytest.raises(CheckpointError, match="without KV-cache scales, got .*self_attn.q_scale"):
        export_checkpoint(target, PER_TENSOR, tmp_path / "again")


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("language_model.model.layers.{}.self_attn", "model.language_model.layers.{}.self_attn"),
        ("model.layers.{}.self_attn", "model.language_model.layers.{}.self_attn"),
        ("backbone.layers.{}.mixer", "model.layers.{}.mixer"),
    ],
)
def test_scales_go_by_the_names_of_the_checkpoint(stem, name, tmp_path):
    stems, names = ([form.format(number) for number in range(2)] for form in (stem, name))
    vision = weights(["vision_tower.encoder.layers.0.self_attn"])
    source = small(tmp_path, weights(stems) | vision)
    scale_set = ScaleSet(dict.fromkeys(names, LayerScales(1.0, 2.0, 3.0)))
    target = export_checkpoint(source, scale_set, tmp_path / "out").folder
    assert list(read_kv_scales(target).layers) == stems
    assert dict(read_kv_scales(target, names).layers) == dict(scale_set.layers)


def changed(scale_set, **layers):
    return ScaleSet({**scale_set.layers, **layers})


@pytest.mark.parametrize(
    ("scale_set", "said"),
    [
        (ScaleSet({LAYERS[0]: LayerScales(1, 1, 1)}), "scales for 'model.layers.1.self_attn' too"),
        (
            changed(PER_TENSOR, **{"visual.blocks.0.attn": LayerScales(1, 1, 1)}),
            "got some for 'vis",
        ),
        (changed(PER_TENSOR, **{LAYERS[0]: LayerScales(None, 1, 1)}), "for all layers or for none"),
        (
            changed(PER_HEAD, **{LAYERS[0]: LayerScales((1, 1), (1, 1), 1)}),
            "expected 4 scales .* q",
        ),
        (changed(PER_HEAD, **{LAYERS[0]: LayerScales(1, (1,), (1,))}), "expected 2 scales .* of k"),
    ],
)
def test_scales_of_other_layers_and_heads(scale_set, said, tmp_path):
    source = small(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        export_checkpoint(source, scale_set, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_one_scale_for_all_heads_beside_scales_per_head_is_written_for_each(tmp_path):
    mixed = changed(PER_HEAD, **{LAYERS[0]: LayerScales(0.5, (0.25, 1.0), 2.0)})
    mixed = changed(mixed, **{LAYERS[1]: LayerScales(0.5, 1.0, 2.0)})
    target = export_checkpoint(small(tmp_path), mixed, tmp_path / "out").folder
    assert dict(read_kv_scales(target).layers) == {
        LAYERS[0]: LayerScales((0.5,) * 4, (0.25, 1.0), (2.0, 2.0)),
        LAYERS[1]: LayerScales((0.5,) * 4, (1.0, 1.0), (2.0, 2.0)),
    }


def test_numbers_are_rounded_to_float32_once(tmp_path):
    scale_set = ScaleSet(dict.fromkeys(LAYERS, LayerScales(0.1, 1 / 3, 0.021)))
    first = read_kv_scales(export_checkpoint(small(tmp_path), scale_set, tmp_path / "a").folder)
    assert first.layers[LAYERS[0]].k == torch.tensor(1 / 3).item() != 1 / 3
    again = export_checkpoint(small(tmp_path), first, tmp_path / "b").folder
    assert read_kv_scales(again) == first


def test_what_is_missing_is_named(tmp_path):
    source = tmp_path / "bare"
    source.mkdir()
    with pytest.raises(CheckpointError, match="expected config.json in .*, got nothing"):
        export_checkpoint(source, PER_TENSOR, tmp_path / "out")
    (source / "config.json").write_text("{}")
    (source / "pytorch_model.bin").touch()
    said = "expected weights in .*, model.safetensors or .*, got only 'config.json', 'pytorch_model"
    with pytest.raises(CheckpointError, match=said):
        export_checkpoint(source, PER_TENSOR, tmp_path / "out")
    with pytest.raises(CheckpointError, match="expected a model's folder, got none"):
        export_checkpoint(tmp_path / "gone", PER_TENSOR, tmp_path / "out")
    write(source, {"weight": torch.ones(1)})
    with pytest.raises(UnsupportedError, match="expected layers with k_proj"):
        export_checkpoint(source, PER_TENSOR, tmp_path / "out")
    write(source, weights(["transformer.h.0.attn"]))
    with pytest.raises(UnsupportedError, match="vLLM reads no scales of layers named"):
        one = ScaleSet({"transformer.h.0.attn": LayerScales(1, 1, 1)})
        export_checkpoint(source, one, tmp_path / "out")


def test_targets_that_are_in_the_way(tmp_path):
    source = small(tmp_path)
    full, file, link = tmp_path / "full", tmp_path / "file", tmp_path / "link"
    full.mkdir()
    (full / "precious").write_text("1")
    file.touch()
    link.symlink_to(tmp_path / "elsewhere")
    for target, said in [
        (full, "with files in it"),
        (file, "got the file or link"),
        (link, "got the file or link"),
        (source, "with files in it"),
        (source / "out", "expected a folder outside"),
        (tmp_path / "gone" / "out", "expected an existing folder"),
    ]:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConfigError, match=said):
            export_checkpoint(source, PER_TENSOR, target)
        assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    target = export_checkpoint(small(tmp_path), PER_TENSOR, tmp_path / "out").folder
    assert read_kv_scales(target) is not None


@pytest.mark.parametrize("step", ["save_file", "write_atomically", "read_kv_scales"])
def test_a_failure_leaves_nothing_behind(step, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    source = small(tmp_path)
    monkeypatch.setattr(export_module, step, fail)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(source, PER_TENSOR, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]
    assert (source / "model.safetensors").stat().st_nlink == 1


def test_scales_that_are_not_read_back_are_not_delivered(tmp_path, monkeypatch):
    def save_others(tensors, path, metadata):
        save_file({name: tensor * 2 for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr(export_module, "save_file", save_others)
    with pytest.raises(CheckpointError, match="are not read back"):
        export_checkpoint(small(tmp_path), PER_TENSOR, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["model-kv-scales.safetensors", "model-00001-of-00001.safetensors"]
)
def test_names_that_are_taken(name, tmp_path):
    source = small(tmp_path)
    (source / name).touch()
    with pytest.raises(CheckpointError, match=f"expected no file {name}"):
        export_checkpoint(source, PER_TENSOR, tmp_path / "out")


def test_links_that_lead_nowhere_or_to_folders(tmp_path):
    source = small(tmp_path)
    (source / "broken").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="broken link"):
        export_checkpoint(source, PER_TENSOR, tmp_path / "out")
    (source / "broken").unlink()
    (tmp_path / "folder").mkdir()
    (source / "folder").symlink_to(tmp_path / "folder")
    with pytest.raises(CheckpointError, match="got links: 'folder'"):
        export_checkpoint(source, PER_TENSOR, tmp_path / "out")


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_scales_of_rotated_or_centered_keys_are_not_exported(format, is_rotated, tmp_path):
    mean = None if is_rotated else ((0.5, -0.5),)
    layers = {layer: LayerScales(0.1, 0.2, 0.3, k_mean=mean) for layer in LAYERS}
    scale_set = ScaleSet(layers, ScaleHeader(kind="kv_cache", rotate_keys=is_rotated))
    said = f"for a checkpoint, got those of keys that were {'rotat' if is_rotated else 'center'}ed"
    with pytest.raises(CheckpointError, match=said):
        export_checkpoint(tmp_path, scale_set, tmp_path.with_name("out"), format=format)
    assert not tmp_path.with_name("out").exists()

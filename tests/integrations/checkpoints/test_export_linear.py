"""FP8 weights in an exported folder: the bits of Fp8Linear, and a config that its readers obey."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

import transformers

import octavo
from octavo import LLM, Recipe, quantize_
from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.checkpoints import export_linear
from octavo.integrations.checkpoints.export_linear import export_weights
from octavo.integrations.checkpoints.kv_scales import read_kv_scales
from octavo.integrations.linear import LinearPlan, plan_linear
from octavo.integrations.transformers.export_plan import plan_export
from octavo.recipe import LinearSettings
from octavo.serving.engine.request import Sampling
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.fp8_folders import make_plain
from octavo_testkit.models.text_models import VISION_LANGUAGE, make_decoder, make_tokenizer

CHANNEL = LinearSettings()
BLOCK = LinearSettings(weight="block 128x128")
ALONE = LinearSettings(activation=None)
# Parts of joined products end where blocks do; several blocks, with partial ones.
BLOCK_SIZES = {"hidden_size": 160, "intermediate_size": 256, "head_dim": 64}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KV_NAMES = [f"model.layers.{number}.self_attn" for number in range(2)]
KV_SCALES = ScaleSet({name: LayerScales(0.5, 0.25, 2.0) for name in KV_NAMES})
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def save(folder, model, **options):
    model.save_pretrained(folder, **options)
    make_tokenizer().save_pretrained(folder)
    return folder


def make(dtype=torch.bfloat16, **changes):
    return make_plain(**{"vocab_size": 300, **changes}).to(dtype)


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", make())


def export(source, target, settings=CHANNEL, *, cache_scales=None, on_layer=None, **patterns):
    plan = plan_export(source, Recipe(linear=settings, **patterns))
    more = {} if on_layer is None else {"on_layer": on_layer}
    return export_weights(source, plan, settings, target, cache_scales=cache_scales, **more)


def load_all(folder):
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def assert_bits_of_the_quantized_model(folder, model, settings, **patterns):
    """Every tensor is that of the model after `quantize_`, in compressed-tensors' shapes."""
    chosen = plan_linear(model, **patterns).chosen
    quantize_(model, settings, **patterns)
    state, found = model.state_dict(), load_all(folder)
    assert found.keys() == state.keys()
    for name, x in state.items():
        shape = (*x.shape, 1) if name.endswith("weight_scale") and x.dim() == 1 else x.shape
        assert found[name].shape == shape
        assert_same_bits(found[name].reshape(x.shape), x)
    fp8 = {n.removesuffix(".weight") for n, x in found.items() if x.dtype == torch.float8_e4m3fn}
    assert fp8 == set(chosen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("settings", "sizes"),
    [(CHANNEL, {}), (BLOCK, BLOCK_SIZES), (ALONE, {})],
    ids=["channel", "block", "alone"],
)
def test_the_bits_are_those_of_the_quantized_model(settings, sizes, dtype, tmp_path):
    model = make(dtype, **sizes)
    with torch.no_grad():  # nothing to scale: all of an output, and all of a block
        model.model.layers[0].mlp.down_proj.weight[7] = 0
        model.model.layers[1].mlp.up_proj.weight[:128, :128] = 0
    source = save(tmp_path / "source", model)
    before = {path: path.read_bytes() for path in source.iterdir()}
    seen = []
    done = export(source, tmp_path / "out", settings, on_layer=lambda *at: seen.append(at))
    assert {path: path.read_bytes() for path in source.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert done.num_layers == 14 and seen == [(number, 14) for number in range(15)]
    assert done.num_bytes_before == sum(x.nbytes for x in load_all(source).values())
    assert done.num_bytes == sum(x.nbytes for x in load_all(done.folder).values())
    assert done.cache is None
    assert_bits_of_the_quantized_model(done.folder, model, settings)
    copied = {path.name for path in source.iterdir()} - {"model.safetensors", "config.json"}
    assert copied
    for name in copied:
        assert (done.folder / name).read_bytes() == (source / name).read_bytes()


def test_the_config_says_what_was_done(tmp_path, source):
    written = read_config(export(source, tmp_path / "out").folder)
    e4m3 = {"num_bits": 8, "type": "float", "symmetric": True}
    assert written.pop("quantization_config") == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**e4m3, "dynamic": False, "strategy": "channel"},
                "input_activations": {**e4m3, "dynamic": True, "strategy": "token"},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", "model.embed_tokens"],
    }
    assert written == read_config(source)


def test_blocks_and_weights_alone_are_announced(tmp_path, source):
    large = save(tmp_path / "large", make(**BLOCK_SIZES))
    of_blocks = read_config(export(large, tmp_path / "a", BLOCK).folder)["quantization_config"]
    group = of_blocks["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "block"
    assert group["weights"]["block_structure"] == [128, 128]
    assert (group["input_activations"]["strategy"], group["input_activations"]["group_size"]) == (
        "group",
        128,
    )
    alone = read_config(export(source, tmp_path / "b", ALONE).folder)["quantization_config"]
    assert alone["format"] == "naive-quantized"
    assert alone["config_groups"]["group_0"]["input_activations"] is None


def test_shards_keep_their_files_and_get_a_new_index(tmp_path):
    model = make()
    source = save(tmp_path / "source", model, max_shard_size="200KB")
    files = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(files) > 2
    target = export(source, tmp_path / "out").folder
    assert sorted(path.name for path in target.glob("*.safetensors")) == files
    index = json.loads((target / "model.safetensors.index.json").read_text())
    for file in files:
        named = {name for name, place in index["weight_map"].items() if place == file}
        assert set(load_file(target / file)) == named
        old = set(load_file(source / file))
        assert old == {name for name in named if not name.endswith("_scale")}
    tensors = load_all(target)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(x.numel() for x in tensors.values())
    assert_bits_of_the_quantized_model(target, model, CHANNEL)


def test_ignored_layers_stay_and_are_listed(tmp_path):
    model = make()
    source = save(tmp_path / "source", model)
    target = export(source, tmp_path / "out", ignored_layers=["down_proj", "0"]).folder
    ignored = read_config(target)["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.down_proj" in ignored and f"{ATTENTION}.q_proj" in ignored
    assert "model.layers.1.mlp.up_proj" not in ignored
    assert_bits_of_the_quantized_model(target, model, CHANNEL, ignored_layers=["down_proj", "0"])


@pytest.mark.parametrize(
    ("pattern", "product", "names"),
    [
        ("k_proj", "q_proj | k_proj | v_proj", ("q_proj", "k_proj")),
        ("up_proj", "gate_proj | up_proj", ("gate_proj", "up_proj")),
    ],
)
def test_products_of_vllm_stay_whole(pattern, product, names, tmp_path, source):
    with pytest.raises(ConfigError, match=re.escape(product)) as info:
        export(source, tmp_path / "out", ignored_layers=[pattern])
    assert all(name in str(info.value) for name in names)
    assert "ignored_layers" in str(info.value)
    assert list(tmp_path.iterdir()) == [source]


def test_a_projection_too_small_for_fp8_holds_its_product_back(tmp_path):
    model = make(head_dim=4, num_key_value_heads=1)  # k_proj has 4 outputs
    source = save(tmp_path / "source", model)
    with pytest.raises(ConfigError, match=r"q_proj without .*(small: 160 to 4)"):
        export(source, tmp_path / "out")
    rest = ["q_proj", "k_proj", "v_proj"]
    assert export(source, tmp_path / "out", ignored_layers=rest).num_layers == 8


def test_parts_of_products_end_where_blocks_do(tmp_path, source):
    said = r"model.layers.0.mlp.gate_proj: expected a multiple of 128 outputs .*, got 280"
    ignored = ["q_proj", "k_proj", "v_proj"]
    with pytest.raises(UnsupportedError, match=said):
        export(source, tmp_path / "out", BLOCK, ignored_layers=ignored)
    assert list(tmp_path.iterdir()) == [source]
    both = ["gate_proj", "up_proj", *ignored]  # o_proj and down_proj are products of their own
    assert export(source, tmp_path / "out", BLOCK, ignored_layers=both).num_layers == 4


@pytest.mark.parametrize(
    "settings",
    [
        LinearSettings(weight="tensor"),
        LinearSettings(scaling="static"),
        LinearSettings(activation="tensor"),
        LinearSettings(weight="block 128x128", activation="token"),
        LinearSettings(activation="block 1x128"),
    ],
    ids=str,
)
def test_schemes_that_vllm_would_run_otherwise(settings, tmp_path, source):
    plan = plan_export(source, Recipe(linear="fp8"))
    with pytest.raises(UnsupportedError, match="expected weights per channel with activations"):
        export_weights(source, plan, settings, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_layers_with_other_schemes_are_refused(tmp_path, source):
    with pytest.raises(UnsupportedError, match="weight_only_layers: .*down_proj"):
        export(source, tmp_path / "out", weight_only_layers=["down_proj"])
    done = export(source, tmp_path / "out", ALONE, weight_only_layers=["down_proj"])
    assert done.num_layers == 14


def test_sources_that_are_quantized_or_have_scales(tmp_path, source):
    target = export(source, tmp_path / "out").folder
    with pytest.raises(CheckpointError, match="quantized already; export the checkpoint it was"):
        export(target, tmp_path / "again")
    plan = plan_export(source, Recipe(linear="fp8"))
    whole = load_file(source / "model.safetensors")
    for name, x in {
        f"{MLP}.up_proj.weight_scale": torch.ones(1),
        f"{ATTENTION}.k_scale": torch.ones(1),
        f"{MLP}.up_proj.weight": whole[f"{MLP}.up_proj.weight"].to(torch.float8_e4m3fn),
    }.items():
        save_file({**whole, name: x}, source / "model.safetensors")
        with pytest.raises(CheckpointError, match=name):
            export_weights(source, plan, CHANNEL, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def answer(model, **options):
    llm = LLM(model, dtype="float32", device="cpu", **options)
    sampling = Sampling(max_tokens=8, temperature=0.0)
    return [list(one.tokens) for one in llm.generate([[5, 9, 30], [7] * 20], sampling)]


@pytest.mark.parametrize(
    ("settings", "sizes"), [(CHANNEL, {}), (BLOCK, BLOCK_SIZES)], ids=["channel", "block"]
)
def test_the_engine_runs_it_as_it_runs_the_quantized_model(settings, sizes, tmp_path):
    source = save(tmp_path / "source", make(**sizes))
    target = export(source, tmp_path / "out", settings).folder
    ids = torch.tensor([[5, 9, 30, 7]])
    loaded = octavo.load_fp8(transformers.AutoModelForCausalLM, target, dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = plain(ids).logits
    quantize_(plain, settings)
    assert_same_bits(loaded(ids).logits, plain(ids).logits)
    assert not loaded(ids).logits.equal(expected)
    assert answer(str(target)) == answer(str(source), recipe=Recipe(linear=settings))


def test_weights_and_cache_scales_in_one_folder(tmp_path, source):
    done = export(source, tmp_path / "out", cache_scales=KV_SCALES)
    assert done.cache.num_layers == 2 and done.folder == done.cache.folder == tmp_path / "out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert dict(read_kv_scales(done.folder, KV_NAMES).layers) == dict(KV_SCALES.layers)
    settings = read_config(done.folder)["quantization_config"]
    assert settings["format"] == "float-quantized" and settings["kv_cache_scheme"]["num_bits"] == 8
    plain = load_all(export(source, tmp_path / "plain").folder)
    both = load_all(done.folder)
    assert {name for name in both if name not in plain} == {
        f"{name}.{part}_scale" for name in KV_NAMES for part in "qkv"
    }
    for name, x in plain.items():
        assert_same_bits(both[name], x)
    recipe = {"kv_cache": {"scaling": "static"}, "scales": KV_SCALES.to_dict()["layers"]}
    assert answer(str(done.folder), recipe=Recipe(kv_cache="fp8")) == answer(
        str(source), recipe=Recipe(linear="fp8", **recipe)
    )


def test_wrong_cache_scales_are_found_before_any_weight_is_written(tmp_path, source, monkeypatch):
    monkeypatch.setattr(export_linear, "save_file", None)
    few = ScaleSet({KV_NAMES[0]: LayerScales(0.5, 0.25, 2.0)})
    with pytest.raises(CheckpointError, match="layers.1.self_attn' too") as info:
        export(source, tmp_path / "out", cache_scales=few)
    assert ".octavo-" not in str(info.value)
    assert list(tmp_path.iterdir()) == [source]


def test_experts_in_one_tensor_stay_and_readers_are_told(tmp_path):
    model = make_decoder("qwen3_moe", dtype=torch.bfloat16, **MOE)
    source = save(tmp_path / "source", model)
    done = export(source, tmp_path / "out")
    assert done.num_layers == 4 * 4  # q, k, v and o
    ignored = read_config(done.folder)["quantization_config"]["ignore"]
    assert ignored[-1] == r"re:.*\.experts(\..*)?$"
    assert f"{MLP}.gate" in ignored and not any(".experts" in name for name in ignored[:-1])
    # What vLLM and compressed-tensors ask for: the layer, or a matrix in it.
    for name in (f"{MLP}.experts", f"{MLP}.experts.0.gate_proj", f"{MLP}.experts.gate_up_proj"):
        assert re.match(ignored[-1].removeprefix("re:"), name)
    assert not re.match(ignored[-1].removeprefix("re:"), f"{MLP}.shared_experts.up_proj")
    before, after = load_all(source), load_all(done.folder)
    experts = [name for name in before if ".experts" in name]
    assert experts
    for name in experts:
        assert_same_bits(after[name], before[name])
    assert_same_bits(
        octavo.load_fp8(transformers.AutoModelForCausalLM, done.folder)(
            torch.tensor([[5, 9, 30]])
        ).logits,
        quantized(source)(torch.tensor([[5, 9, 30]])).logits,
    )


def quantized(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    quantize_(model, CHANNEL)
    return model


def test_experts_that_are_linear_layers_are_quantized_together(tmp_path, source):
    numbers = {f"{MLP}.gate_proj": f"{MLP}.experts.0.up", f"{MLP}.up_proj": f"{MLP}.experts.1.up"}
    path = source / "model.safetensors"
    tensors = load_file(path)
    for name, expert in numbers.items():
        tensors[f"{expert}.weight"] = tensors.pop(f"{name}.weight")
    save_file(tensors, path)
    first, second = numbers.values()
    with pytest.raises(ConfigError, match=rf"{MLP}.experts as one product: .*{first} without"):
        plan = LinearPlan({first: (first,)}, {second: "ignored_layers"})
        export_weights(source, plan, CHANNEL, tmp_path / "out")
    plan = LinearPlan({first: (first,), second: (second,)}, {})
    target = export_weights(source, plan, CHANNEL, tmp_path / "out").folder
    ignored = read_config(target)["quantization_config"]["ignore"]
    assert f"{ATTENTION}.q_proj" in ignored
    assert not any("experts" in name for name in ignored)


def test_tied_heads_stay(tmp_path):
    source = save(tmp_path / "source", make(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_all(source)
    done = export(source, tmp_path / "out")
    ignored = read_config(done.folder)["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "model.embed_tokens"] and done.num_layers == 14


def renamed(folder, rename):
    """The folder with other names of tensors."""
    path = folder / "model.safetensors"
    save_file({rename(name): x for name, x in load_file(path).items()}, path)
    return folder


def test_names_of_the_checkpoint_are_kept(tmp_path):
    model = make_decoder(VISION_LANGUAGE, dtype=torch.bfloat16)
    source = save(tmp_path / "source", model)
    plan = plan_export(source, Recipe(linear="fp8", ignored_layers=["blocks"]))
    chosen = {"model.language_model.layers.0.mlp.up_proj", "model.visual.merger.linear_fc1"}
    assert chosen < plan.chosen.keys()

    def rename(name):  # as older versions of transformers had them
        name = name.replace("model.visual.", "visual.")
        return name.replace("model.language_model.", "language_model.model.")

    renamed(source, rename)
    target = export_weights(source, plan, CHANNEL, tmp_path / "out").folder
    tensors = load_all(target)
    for name in chosen:
        assert tensors[f"{rename(name)}.weight"].dtype == torch.float8_e4m3fn
    assert tensors["visual.blocks.0.mlp.linear_fc1.weight"].dtype == torch.bfloat16
    ignored = read_config(target)["quantization_config"]["ignore"]
    assert {"visual.blocks.0.mlp.linear_fc1", "model.visual.blocks.0.mlp.linear_fc1"} < {*ignored}
    assert not any("up_proj" in name or "merger.linear" in name for name in ignored)


@pytest.mark.parametrize("is_doubled", [False, True])
def test_layers_that_the_checkpoint_has_otherwise(is_doubled, tmp_path, source):
    plan = plan_export(source, Recipe(linear="fp8"))
    path = source / "model.safetensors"
    tensors = load_file(path)
    up = tensors.pop(f"{MLP}.up_proj.weight")
    prefixes = ("", "backbone.") if is_doubled else ("other.",)
    for prefix in prefixes:
        tensors[f"{prefix}{MLP.removeprefix('model.')}.up_proj.weight"] = up.clone()
    save_file(tensors, path)
    with pytest.raises(UnsupportedError, match=f"none or several for '{MLP}.up_proj'"):
        export_weights(source, plan, CHANNEL, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_a_layer_in_two_places_is_quantized_under_both_names(tmp_path, source):
    plan = plan_export(source, Recipe(linear="fp8"))
    first, second = f"{MLP}.up_proj", "model.layers.1.mlp.up_proj"
    chosen = {name: places for name, places in plan.chosen.items() if name != second}
    chosen[first] = (first, second)
    shared = LinearPlan(chosen, plan.left)
    done = export_weights(source, shared, CHANNEL, tmp_path / "out")
    assert done.num_layers == 14
    assert load_all(done.folder)[f"{second}.weight"].dtype == torch.float8_e4m3fn


def test_other_copies_of_the_weights_stay_behind(tmp_path, source):
    (source / "original").mkdir()
    for name in ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth"):
        (source / name).write_bytes(b"weights")
    (source / "original" / "params.json").write_text("{}")
    target = export(source, tmp_path / "out").folder
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert "original/params.json" in names and "tokenizer.json" in names
    assert not any(name.endswith((".bin", ".pth")) or "consolidated" in name for name in names)


def test_weights_that_are_not_finite_are_named(tmp_path):
    model = make()
    model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.inf
    source = save(tmp_path / "source", model)
    with pytest.raises(ConfigError, match="layers.1.mlp.down_proj: expected a finite weight"):
        export(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("step", ["save_file", "write_atomically", "read_linear", "os.replace"])
def test_a_failure_leaves_nothing_behind(step, tmp_path, source, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    place, _, name = step.rpartition(".")
    monkeypatch.setattr(getattr(export_linear, place) if place else export_linear, name, fail)
    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_what_is_not_read_back_is_not_delivered(tmp_path, source, monkeypatch):
    def save_others(tensors, path, metadata):
        others = {name: x for name, x in tensors.items() if "up_proj" not in name}
        save_file(others, path, metadata)

    monkeypatch.setattr(export_linear, "save_file", save_others)
    with pytest.raises(CheckpointError, match="expected 14 layers to be read back .*, got 12"):
        export(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_targets_that_are_in_the_way(tmp_path, source):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    for target in (tmp_path / "full", source, source / "out", tmp_path / "gone" / "out"):
        with pytest.raises(ConfigError):
            export(source, target)
    (tmp_path / "empty").mkdir()
    assert export(source, tmp_path / "empty").num_layers == 14


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe(), "for linear layers alone, got none"),
        (Recipe(linear="fp8", kv_cache="fp8"), "got kv_cache too: scales of the KV cache are"),
        (Recipe(linear="fp8", vision_attention="fp8"), "got vision_attention too"),
        (Recipe(linear="fp8", included_layers=["lm_head"]), "lm_head"),
        (Recipe(linear="fp8", ignored_layers=["img_mlp"]), "img_mlp"),
    ],
)
def test_recipes_that_say_something_else(recipe, said, source):
    with pytest.raises(ConfigError, match=said):
        plan_export(source, recipe)


def test_folders_that_have_no_language_model(tmp_path):
    with pytest.raises(CheckpointError, match="expected a model's folder, got none"):
        plan_export(tmp_path / "gone", Recipe(linear="fp8"))
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(CheckpointError, match="expected weights in"):
        plan_export(tmp_path, Recipe(linear="fp8"))
    save_file({"x.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected the config of a language model"):
        plan_export(tmp_path, Recipe(linear="fp8"))


@pytest.mark.filterwarnings("ignore")
def test_transformers_and_compressed_tensors_load_it(tmp_path, source):
    pytest.importorskip("compressed_tensors")
    target = export(source, tmp_path / "out").folder
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    loaded(torch.tensor([[5, 9, 30, 7]]))  # weights are decompressed in the first call
    tensors = load_all(target)
    chosen = plan_linear(make()).chosen
    for name, module in loaded.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        assert (scheme is not None) == (name in chosen), name
        if scheme is not None:
            assert scheme.input_activations.strategy == "token"
            assert scheme.input_activations.dynamic is True
            expected = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]
            # It may round to bfloat16.
            torch.testing.assert_close(module.weight.float(), expected, rtol=2**-7, atol=0)
